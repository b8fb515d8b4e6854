/** One question, two settings, side by side. */
import { draftsOf } from "../cache/turns.js";
import { streamAnswer } from "../chat/answer.js";
import { DocumentChips, documentOfFile } from "../chat/documents.js";
import { requestMessages } from "../chat/settings.js";
import { newId } from "../conversations/tree.js";
import { bytes, count, percent, rate, seconds } from "../format.js";
import { html, useRef, useState } from "../preact.js";
import { fieldsOf, nameRetention } from "../retentions.js";
import { useStore } from "../store.js";
import { firstDifference, splitAtDifference } from "./first_difference.js";

const SIDES = [0, 1];
const NO_ANSWER = { content: "", run: null, fault: null };
const MOST_TOKENS = 200;

export function Compare({ app }) {
  const model = useStore(app.watch.status, (status) => status.model);
  if (model === null) return html`<p class="caption">Waiting for the server.</p>`;
  return html`<${Comparison} app=${app} choices=${choicesOf(model.retentions)} />`;
}

/**
 * What may stand on a side: each retention, with and without drafts where the server drafts for it.
 * @returns {{name: string, retention: object, fields: object}[]} `fields` of a request choose it
 */
function choicesOf(retentions) {
  return retentions.flatMap((retention) => {
    const [name, fields] = [nameRetention(retention), fieldsOf(retention, retentions)];
    if (!retention.drafted) return [{ name, retention, fields }];
    return [
      { name: `${name}, with drafts`, retention, fields: { ...fields, speculative: true } },
      { name: `${name}, without drafts`, retention, fields: { ...fields, speculative: false } },
    ];
  });
}

function Comparison({ app, choices }) {
  const [chosen, choose] = useState([0, choices.length - 1]);
  const [asked, setAsked] = useState(null);
  const [answers, setAnswers] = useState([NO_ANSWER, NO_ANSWER]);
  const [documents, setDocuments] = useState([]);
  const [running, setRunning] = useState(null);
  const form = useRef();
  const compare = async (event) => {
    event.preventDefault();
    const { question, tokens } = form.current.elements;
    const abort = new AbortController();
    const sides = chosen.map((at) => choices[at]);
    setRunning(abort);
    setAsked(sides);
    setAnswers([NO_ANSWER, NO_ANSWER]);
    const messages = requestMessages({}, [{ role: "user", content: question.value, documents }]);
    const body = { model: app.store.value.modelName, messages, max_tokens: tokens.valueAsNumber };
    const tell = (side) => (answer) =>
      setAnswers((both) => both.map((each, at) => (at === side ? { ...each, ...answer } : each)));
    await askBoth(body, sides, abort.signal, tell);
    setRunning(null);
  };
  const addFiles = async ({ target }) => {
    for (const file of target.files) {
      await documentOfFile(file).then(
        (document) => setDocuments((known) => [...known, document]),
        (error) => app.say(error.message),
      );
    }
    target.value = "";
  };
  const remove = (at) => setDocuments(documents.filter((_, other) => other !== at));
  return html`<section class="compare" aria-label="Compare">
    <h2>One question, two settings</h2>
    <p class="caption">
      Both answers are greedy, one after the other, and reuse nothing, so that their times compare.
    </p>
    <form ref=${form} onSubmit=${compare}>
      <textarea name="question" rows="3" required aria-label="Question" placeholder="Ask something"></textarea>
      ${documents.length > 0 && html`<${DocumentChips} documents=${documents} onRemove=${remove} />`}
      <div class="row">
        <label>Add text files <input type="file" multiple onChange=${addFiles} /></label>
        <label>
          Most tokens
          <input name="tokens" type="number" min="1" max="4096" required defaultValue=${MOST_TOKENS} />
        </label>
        ${SIDES.map(
          (side) => html`<${Choice} ...${{ side, choices, chosen, choose }} />`,
        )}
        ${running === null
          ? html`<button class="main">Compare</button>`
          : html`<button type="button" class="main" onClick=${() => running.abort()}>Stop</button>`}
      </div>
    </form>
    ${asked !== null && html`<${Answers} answers=${answers} sides=${asked} running=${running} />`}
  </section>`;
}

/** Ask one after the other; a salt of their own keeps both from finding pages of the other. */
async function askBoth(body, sides, signal, tell) {
  // Drafts may come from earlier answers (suffix), so the side with drafts goes first.
  const drafts = (side) => Number(sides[side].fields.speculative ?? false);
  for (const side of SIDES.toSorted((one, other) => drafts(other) - drafts(one))) {
    if (signal.aborted) return;
    const own = { ...sides[side].fields, temperature: 0, cache_salt: `compare ${newId()}` };
    try {
      await streamAnswer({ ...body, ...own }, signal, tell(side));
    } catch (error) {
      tell(side)({ fault: error.message });
    }
  }
}

const Choice = ({ side, choices, chosen, choose }) => html`<label>
  ${side === 0 ? "Left" : "Right"}
  <select
    name=${side === 0 ? "left" : "right"}
    value=${chosen[side]}
    onChange=${({ target }) => choose(chosen.map((at, other) => (other === side ? Number(target.value) : at)))}
  >
    ${choices.map(({ name }, at) => html`<option value=${at}>${name}</option>`)}
  </select>
</label>`;

function Answers({ answers, sides, running }) {
  const texts = answers.map(({ content }) => content);
  const done = running === null && answers.every(({ run }) => run?.usage);
  const split = splitAtDifference(...texts);
  const at = firstDifference(...texts);
  return html`<div>
    ${done &&
    html`<p role="status" class="verdict">
      ${at === null ? spellEqual(...sides) : `They differ first at word ${at}.`}
    </p>`}
    <div class="sides">
      ${SIDES.map(
        (side) =>
          html`<${Side}
            answer=${answers[side]}
            parts=${done ? split[side] : { same: texts[side], word: "", rest: "" }}
            name=${sides[side].name}
          />`,
      )}
    </div>
  </div>`;
}

/** Equal answers in words. Where only drafts differ, that is what speculation promises. */
const spellEqual = (left, right) =>
  left.retention === right.retention && left.fields.speculative !== right.fields.speculative
    ? "Both answers are equal: drafts change the speed, and no word."
    : "Both answers are equal.";

const Side = ({ answer, parts, name }) => html`<article aria-label=${`Answer with ${name}`}>
  <h3>${name}</h3>
  <${Figures} run=${answer.run} />
  ${answer.fault !== null && html`<p class="fault" role="alert">${answer.fault}</p>`}
  <div class="words">${parts.same}${parts.word && html`<mark>${parts.word}</mark>`}${parts.rest}</div>
</article>`;

function Figures({ run }) {
  const usage = run?.usage;
  const drafts = usage && draftsOf(run);
  const rows = [
    ["KV cache", usage && `${bytes(usage.kv_bytes)} (${percent(usage.kv_bytes / usage.kv_bytes_uncompressed)})`],
    ["First token", run && seconds(run.firstTokenS)],
    ["Speed", run && rate(run.tokensPerS)],
    ["Prompt + answer", usage && `${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`],
    ...(drafts ? [["Drafts kept", `${drafts.accepted} of ${drafts.accepted + drafts.rejected}`]] : []),
  ];
  return html`<dl class="figures">
    ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value ?? "–"}</dd></div>`)}
  </dl>`;
}
