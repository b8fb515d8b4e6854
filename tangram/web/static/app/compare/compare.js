/** One question, two settings, side by side. */
import { draftsOf } from "../cache/turns.js";
import { QuestionForm, SubmitOrStop } from "../chat/question_form.js";
import { bytes, count, percentHeld, rate, seconds } from "../format.js";
import { html, useEffect } from "../preact.js";
import { fieldsOf, nameRetention } from "../retentions.js";
import { useStore } from "../store.js";
import { SIDES } from "./comparison.js";
import { firstDifference, splitAtDifference } from "./first_difference.js";

export function Compare({ app }) {
  const model = useStore(app.watch.status, (status) => status.model);
  const fault = useStore(app.watch.status, (status) => status.fault);
  if (model === null) {
    return html`<p class="caption" role="status">
      ${fault === null ? "Waiting for the server." : `Settings cannot be compared: ${fault}`}
    </p>`;
  }
  return html`<${Comparing} app=${app} choices=${choicesOf(model.retentions)} />`;
}

/**
 * What may stand on a side: each retention, with and without drafts where the server drafts for it.
 * @returns {Setting[]} see comparison.js
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

function Comparing({ app, choices }) {
  const { comparison } = app;
  const { store } = comparison;
  useEffect(() => {
    comparison.begin();
  }, [comparison]);
  const { question, documents, tokens, names, asked, answers, running } = useStore(store);
  // What is not served any more gives way to the first, and on the right to the last.
  const sides = SIDES.map(
    (side) => choices.find(({ name }) => name === names[side]) ?? choices.at(side === 0 ? 0 : -1),
  );
  const compare = (event) => {
    event.preventDefault();
    comparison.ask(sides);
  };
  const area = {
    rows: 3,
    required: documents.length === 0,
    value: question,
    onInput: ({ target }) => store.set({ question: target.value }),
  };
  const change = (update) => store.set({ documents: update(store.value.documents) });
  return html`<section class="compare" aria-label="Compare">
    <h2>One question, two settings</h2>
    <p class="caption">
      Ask about the logbook, or about a text of your own. Both answers are greedy, one after the
      other, and reuse nothing, so that their times compare.
    </p>
    <${QuestionForm} ...${{ app, documents, change, area }} onSubmit=${compare}>
      <label>
        Most tokens
        <input
          type="number"
          min="1"
          max="4096"
          required
          value=${tokens}
          onInput=${({ target }) => store.set({ tokens: target.value })}
        />
      </label>
      ${SIDES.map((side) => {
        const choose = (name) => store.set({ names: names.with(side, name) });
        return html`<${Choice} ...${{ side, choices, choose }} chosen=${sides[side].name} />`;
      })}
      <${SubmitOrStop} label="Compare" running=${running} onStop=${() => comparison.stop()} />
    <//>
    ${asked !== null && html`<${Answers} answers=${answers} sides=${asked} running=${running} />`}
  </section>`;
}

const Choice = ({ side, choices, chosen, choose }) => html`<label>
  ${side === 0 ? "Left" : "Right"}
  <select value=${chosen} onChange=${({ target }) => choose(target.value)}>
    ${choices.map(({ name }) => html`<option value=${name}>${name}</option>`)}
  </select>
</label>`;

function Answers({ answers, sides, running }) {
  const texts = answers.map(({ content }) => content);
  const done = !running && answers.every(({ run }) => run?.usage);
  const split = splitAtDifference(...texts);
  const at = firstDifference(...texts);
  return html`<div>
    ${done &&
    html`<p role="status" class="verdict">
        ${at === null ? spellEqual(...sides) : `They differ first at word ${at}.`}
      </p>
      <p class="caption">${spellRatios(...answers.map(({ run }) => run))}</p>`}
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

/** The left answer's figures as multiples of the right one's. */
function spellRatios(left, right) {
  const ratios = [
    ["KV cache", left.usage.kv_bytes / right.usage.kv_bytes],
    ["time to the first token", left.firstTokenS / right.firstTokenS],
    ["speed", left.tokensPerS / right.tokensPerS],
  ];
  const known = ratios.filter(([, ratio]) => Number.isFinite(ratio));
  return `Left beside right: ${known.map(([name, ratio]) => `${ratio.toFixed(2)} × the ${name}`).join(", ")}.`;
}

const Side = ({ answer, parts, name }) => html`<article aria-label=${`Answer with ${name}`}>
  <h3>${name}</h3>
  <${Figures} run=${answer.run} />
  ${answer.fault !== null && html`<p class="fault" role="alert">${answer.fault}</p>`}
  ${answer.run?.finish === "stopped" && html`<p class="soft">Stopped.</p>`}
  <div class="words">${parts.same}${parts.word && html`<mark>${parts.word}</mark>`}${parts.rest}</div>
</article>`;

function Figures({ run }) {
  const usage = run?.usage;
  const drafts = usage && draftsOf(run);
  const rows = [
    ["KV cache", usage && `${bytes(usage.kv_bytes)} (${percentHeld(usage)})`],
    ["First token", run && seconds(run.firstTokenS)],
    ["Speed", run && rate(run.tokensPerS)],
    ["Prompt + answer", usage && `${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`],
    ...(drafts ? [["Drafts kept", `${drafts.accepted} of ${drafts.accepted + drafts.rejected}`]] : []),
  ];
  return html`<dl class="figures">
    ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value ?? "–"}</dd></div>`)}
  </dl>`;
}
