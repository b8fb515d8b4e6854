/** The conversation that is open: its messages, the question to come, and its settings. */
import { shownMessages } from "../conversations/tree.js";
import { html, useLayoutEffect, useMemo, useRef } from "../preact.js";
import { useStore } from "../store.js";
import { Composer } from "./composer.js";
import { MessageView } from "./message.js";
import { questionsLeft } from "./sample.js";
import { SettingsPanel } from "./settings_panel.js";
import { Questions, Welcome } from "./welcome.js";

const NEAR_END_PX = 60;

export function Chat({ app }) {
  const conversation = useStore(app.store, (value) => value.conversations[value.currentId]);
  const running = useStore(app.store, (value) => value.running.includes(value.currentId));
  if (conversation === undefined) return html`<section class="chat"></section>`;
  return html`<section class="chat" aria-label="Conversation">
    <${Messages} key=${conversation.id} app=${app} conversation=${conversation} running=${running} />
    <${SettingsPanel} key=${`of ${conversation.id}`} app=${app} conversation=${conversation} />
    <${Composer} key=${`to ${conversation.id}`} app=${app} running=${running} />
  </section>`;
}

function Messages({ app, conversation, running }) {
  const frame = useFollowedEnd(conversation);
  const shown = shownMessages(conversation);
  return html`<div class="messages" ref=${frame} tabindex="0" role="region" aria-label="Messages">
    ${shown.length === 0 && html`<${Welcome} app=${app} />`}
    ${shown.map(
      (message, at) =>
        html`<${Remembered}
          key=${message.id}
          app=${app}
          message=${message}
          branches=${branchesOf(conversation, message)}
          grows=${running && at === shown.length - 1}
          locked=${running}
        />`,
    )}
    ${!running && html`<${Questions} questions=${questionsLeft(shown)} onAsk=${(text) => app.send(text, [])} />`}
  </div>`;
}

/** The ids beside a message as one text, so that equal ones are equal. */
const branchesOf = ({ messages }, { parent }) =>
  Object.values(messages)
    .filter((other) => other.parent === parent)
    .map(({ id }) => id)
    .join(" ");

/** A message renders again only when something of it has changed. */
function Remembered({ app, message, branches, grows, locked }) {
  return useMemo(
    () =>
      html`<${MessageView}
        app=${app}
        message=${message}
        branches=${branches.split(" ")}
        grows=${grows}
        locked=${locked}
      />`,
    [message, branches, grows, locked],
  );
}

/** Keeps the end in sight while an answer grows, unless the reader has scrolled away from it. */
function useFollowedEnd(conversation) {
  const frame = useRef();
  const follows = useRef(true);
  useLayoutEffect(() => {
    const element = frame.current;
    const note = () => {
      const left = element.scrollHeight - element.scrollTop - element.clientHeight;
      follows.current = left < NEAR_END_PX;
    };
    element.addEventListener("scroll", note, { passive: true });
    const observer = new ResizeObserver(() => {
      if (follows.current) element.scrollTop = element.scrollHeight;
    });
    for (const child of element.children) observer.observe(child);
    const added = new MutationObserver((changes) => {
      follows.current = true;
      for (const { addedNodes } of changes) {
        for (const node of addedNodes) if (node instanceof Element) observer.observe(node);
      }
    });
    added.observe(element, { childList: true });
    return () => {
      element.removeEventListener("scroll", note);
      observer.disconnect();
      added.disconnect();
    };
  }, [conversation.id]);
  return frame;
}
