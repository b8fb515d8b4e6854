/** One question to two settings; it lives as long as the tab, whichever view is shown. */
import { streamAnswer } from "../chat/answer.js";
import { SAMPLE_QUESTIONS, fitsSample, readSample } from "../chat/sample.js";
import { requestMessages } from "../chat/settings.js";
import { newId } from "../conversations/tree.js";
import { Store } from "../store.js";

export const SIDES = [0, 1];
const NO_ANSWER = { content: "", run: null, fault: null };
const MOST_TOKENS = 200;

/**
 * @typedef {object} Setting what may stand on a side
 * @property {string} name
 * @property {object} retention see retentions.js
 * @property {object} fields of a request, which choose it
 */

/**
 * The store has the form (`question`, `documents`, `tokens`, and the `names` of the chosen sides,
 * null until one is chosen), `asked` (both sides, or null), their `answers`, and `running`.
 */
export class Comparison {
  store = new Store({
    question: "",
    documents: [],
    tokens: String(MOST_TOKENS),
    names: [null, null],
    asked: null,
    answers: [NO_ANSWER, NO_ANSWER],
    running: false,
  });
  #app;
  #abort = null;
  #begun = false;

  constructor(app) {
    this.#app = app;
  }

  /** Fill the form with the sample, when it is shown for the first time. */
  async begin() {
    if (this.#begun) return;
    this.#begun = true;
    if (!fitsSample(this.#app.store.value.mostTokens)) return;
    const sample = await readSample().catch(({ message }) => this.#app.say(message));
    const { question, documents } = this.store.value;
    if (!sample || question !== "" || documents.length > 0) return;
    this.store.set({ question: SAMPLE_QUESTIONS[1], documents: [sample] });
  }

  /** Ask one side after the other. @param {Setting[]} sides */
  async ask(sides) {
    const { question, documents, tokens, running } = this.store.value;
    if (running) return;
    this.#abort = new AbortController();
    this.store.set({ asked: sides, answers: [NO_ANSWER, NO_ANSWER], running: true });
    const body = {
      model: this.#app.store.value.modelName,
      messages: requestMessages({}, [{ role: "user", content: question.trim(), documents }]),
      max_tokens: Number(tokens),
      temperature: 0,
    };
    for (const side of inOrder(sides)) await this.#askSide(side, { ...body, ...sides[side].fields });
    this.store.set({ running: false });
  }

  /** End the answer that is being written; the other one, if it has not begun, is not asked for. */
  stop() {
    this.#abort?.abort();
  }

  async #askSide(side, body) {
    const tell = (changes) => {
      const { answers } = this.store.value;
      this.store.set({ answers: answers.with(side, { ...answers[side], ...changes }) });
    };
    try {
      // A salt of its own keeps it from finding pages of the other.
      await streamAnswer({ ...body, cache_salt: `compare ${newId()}` }, this.#abort.signal, tell);
    } catch (error) {
      tell({ fault: error.message });
      if (error.status === 401) this.#app.askForKey();
    }
  }
}

/** Drafts may come from earlier answers (suffix), so the side with drafts goes first. */
function inOrder(sides) {
  const drafts = (side) => Number(sides[side].fields.speculative ?? false);
  return SIDES.toSorted((one, other) => drafts(other) - drafts(one));
}
