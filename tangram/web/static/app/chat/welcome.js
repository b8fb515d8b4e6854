/** What an empty conversation shows: what this is, and questions to begin with. */
import { html } from "../preact.js";
import { useStore } from "../store.js";
import { SAMPLE_QUESTIONS, fitsSample, readSample } from "./sample.js";

export function Welcome({ app }) {
  const hasCache = useStore(app.watch.status, ({ fault }) => fault === null);
  const mostTokens = useStore(app.store, (state) => state.mostTokens);
  const fits = fitsSample(mostTokens);
  const ask = (question) =>
    readSample().then(
      (document) => app.send(question, [document]),
      ({ message }) => app.say(message),
    );
  return html`<div class="welcome">
    <h2>Which words does a model have to remember?</h2>
    <p>
      Tangram compresses the KV cache: each head keeps the words that it needs.${" "}
      ${fits
        ? "Ask about a winter's logbook of some 2,200 words."
        : `A conversation with this server has at most ${mostTokens} tokens.`}
      ${hasCache &&
      html`${" "}<span class="wide-only">The panel beside colours</span
        ><span class="narrow-only">Then open Cache, which colours</span> each word by the share of
        heads that still hold it.`}
    </p>
    ${fits && html`<${Questions} questions=${SAMPLE_QUESTIONS} onAsk=${ask} />`}
    <p class="soft">
      ${fits ? "Or write" : "Write"} your own question below. A long text that you paste becomes a document of the
      conversation.
    </p>
  </div>`;
}

export const Questions = ({ questions, onAsk }) => html`<ul class="questions">
  ${questions.map(
    (question) => html`<li key=${question}>
      <button onClick=${() => onAsk(question)}>${question}</button>
    </li>`,
  )}
</ul>`;
