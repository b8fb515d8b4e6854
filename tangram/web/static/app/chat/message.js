/** One message: its text, its documents, its branches, and what can be done with it. */
import { copyText } from "../clipboard.js";
import { bytes, count, percentHeld, rate, seconds } from "../format.js";
import { Fragment, html, useEffect, useFocus, useRef, useState } from "../preact.js";
import { DocumentChips } from "./documents.js";
import { MarkdownView } from "./markdown.js";

export function MessageView({ app, message, branches, grows, locked }) {
  const [edits, edit] = useState(false);
  const user = message.role === "user";
  return html`<article class="message ${message.role}" aria-label=${user ? "You" : "Answer"}>
    ${message.documents?.length > 0 && html`<${DocumentChips} documents=${message.documents} />`}
    ${message.thought && html`<${Thought} text=${message.thought} open=${grows && !message.content} />`}
    ${edits
      ? html`<${Editor} app=${app} message=${message} done=${() => edit(false)} />`
      : html`<${Content} app=${app} message=${message} grows=${grows} />`}
    ${message.fault && html`<p class="fault" role="alert">${message.fault}</p>`}
    <footer>
      <${Branches} app=${app} message=${message} branches=${branches} locked=${locked} />
      ${!grows &&
      !edits &&
      html`<${Tools} ...${{ app, message, locked }} onEdit=${user ? () => edit(true) : null} />`}
      ${!user && html`<${RunLine} run=${message.run} unfinished=${!grows && !message.fault} />`}
    </footer>
  </article>`;
}

function Content({ app, message, grows }) {
  if (message.role === "user") return html`<div class="words">${message.content}</div>`;
  return html`<${Fragment}>
    <${Markdown} text=${message.content} grows=${grows} />
    ${grows && html`<span class="cursor" role="status" aria-label="The answer is being written"></span>`}
    ${grows && !message.content && !message.thought && html`<${Reading} watch=${app.watch} />`}
  <//>`;
}

/** How much of the question is in the cache, before the answer's first token. */
function Reading({ watch }) {
  // Until the server has told of this request, the cache is that of the answer before.
  const readNow = () =>
    watch.cache?.view?.state === "running" ? [watch.cache.cachedTokens, watch.cache.tokens] : null;
  const [progress, setProgress] = useState(readNow);
  useEffect(() => watch.on("request", () => setProgress(readNow())), [watch]);
  return (
    progress &&
    html`<span class="soft"> reading: ${count(progress[0])} of ${count(progress[1])} tokens</span>`
  );
}

// While an answer grows, at most this share of the time is spent on its Markdown.
const MOST_SHARE = 1 / 4;

/** Markdown that may grow. Long blocks are rendered less often, so that frames keep coming. */
function Markdown({ text, grows }) {
  const element = useRef();
  const state = useRef({ view: null, timer: null, pauseMs: 0, text: "", grows: false });
  useEffect(() => {
    state.current.view = new MarkdownView(element.current);
    return () => clearTimeout(state.current.timer);
  }, []);
  useEffect(() => {
    const now = state.current;
    Object.assign(now, { text, grows });
    if (!grows) clearTimeout(now.timer);
    if (!grows || now.timer === null) showText(now);
  }, [text, grows]);
  return html`<div class="markdown" ref=${element}></div>`;
}

function showText(state) {
  const begun = performance.now();
  state.view.show(state.text, state.grows);
  const shown = state.text;
  state.timer = null;
  if (!state.grows) return;
  const pause = (performance.now() - begun) / MOST_SHARE;
  state.timer = setTimeout(() => {
    state.timer = null;
    if (state.text !== shown) showText(state);
  }, pause);
}

const Thought = ({ text, open }) => html`<details class="thought" open=${open}>
  <summary>Thought</summary>
  <div class="words">${text}</div>
</details>`;

function Editor({ app, message, done }) {
  const text = useFocus();
  const save = () => {
    const content = text.current.value.trim();
    done();
    if (content !== "") app.edit(message, content);
  };
  const press = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      save();
    }
  };
  return html`<div class="editor">
    <textarea
      ref=${text}
      aria-label="The question, to change it"
      rows="3"
      defaultValue=${message.content}
      onKeyDown=${press}
    ></textarea>
    <p class="row">
      <button class="main" onClick=${save}>Ask this</button>
      <button onClick=${done}>Cancel</button>
    </p>
  </div>`;
}

/** Which of several answers, or questions, is shown. */
function Branches({ app, message, branches, locked }) {
  if (branches.length < 2) return null;
  const at = branches.indexOf(message.id);
  const go = (step) => () => app.showBranch(branches[at + step]);
  const none = (step) => locked || branches[at + step] === undefined;
  return html`<span class="branches">
    <button aria-label="Previous branch" disabled=${none(-1)} onClick=${go(-1)}>‹</button>
    <span>${at + 1} of ${branches.length}</span>
    <button aria-label="Next branch" disabled=${none(1)} onClick=${go(1)}>›</button>
  </span>`;
}

function Tools({ app, message, locked, onEdit }) {
  const showCache = () => {
    app.watchAnswer(message);
    app.openDrawer("cache");
  };
  return html`<span class="message-tools">
    <button onClick=${() => copyText(message.content)}>Copy</button>
    ${onEdit && html`<button disabled=${locked} onClick=${onEdit}>Edit</button>`}
    ${!onEdit &&
    html`<button disabled=${locked} onClick=${() => app.regenerate(message)}>Regenerate</button>
      ${message.run?.requestId &&
      html`<button onClick=${showCache}>Show its cache</button>`}`}
  </span>`;
}

const ENDS = { length: "cut by its limit", stopped: "stopped" };

/** What the answer cost, in a line. One that ended with its tab has no end. */
function RunLine({ run, unfinished }) {
  if (run === undefined) return unfinished && html`<span class="run">not finished</span>`;
  const { usage } = run;
  const parts = [
    usage && `${count(usage.completion_tokens)} tokens`,
    run.tokensPerS && rate(run.tokensPerS),
    run.firstTokenS !== null && `first token after ${seconds(run.firstTokenS)}`,
    usage?.kv_bytes &&
      `${bytes(usage.kv_bytes)} of KV cache, ${percentHeld(usage)}`,
    run.finish === null ? unfinished && "not finished" : ENDS[run.finish],
  ];
  return html`<span class="run">${parts.filter(Boolean).join(" · ")}</span>`;
}
