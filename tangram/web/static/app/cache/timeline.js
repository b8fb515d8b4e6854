/** The last steps of the engine: how long each took, and what it consisted of. */
import { ChoicePicture } from "./canvas.js";

const MOST_STEPS = 400;
const HEIGHT = 110;
const SHOWN_SHARE = 0.98;
const MARK = 6;

/** What a step's time is divided by, with the number that weighs it, and its colour. */
export const PARTS = [
  ["decode tokens", ({ decode_tokens: tokens }) => tokens, "#0072b2"],
  ["chunk tokens", ({ chunks }, chunkTokens) => chunks * chunkTokens, "#e69f00"],
  ["tail tokens", ({ tail_tokens: tokens }) => tokens, "#009e73"],
  ["moves of pages", ({ moves }) => moves, "#cc79a7"],
];

/** The last steps, first to last. */
export class Steps {
  list = [];

  replace(steps) {
    this.list = steps.slice(-MOST_STEPS);
  }

  add(step) {
    this.list.push(step);
    if (this.list.length > MOST_STEPS) this.list.shift();
  }
}

/** A bar a step. What is chosen is a step, wherever its bar moves. */
export class Timeline extends ChoicePicture {
  #steps = [];

  constructor(canvas, frame, chunkTokens, onStep) {
    super(canvas, frame, onStep);
    this.chunkTokens = chunkTokens;
    this.fit();
  }

  fit() {
    super.fit(HEIGHT);
  }

  show(steps) {
    this.#steps = steps.list;
    this.change();
  }

  get #bar() {
    return Math.max(1, this.width / MOST_STEPS);
  }

  paint(context) {
    context.clearRect(0, 0, this.width, this.height);
    const most = this.#mostSeconds();
    const left = this.width - this.#steps.length * this.#bar;
    this.#steps.forEach((step, at) => {
      const height = Math.max(1, Math.min(1, step.seconds / most) * this.height);
      this.#paintStep(context, step, left + at * this.#bar, height);
      if (step === this.chosen) {
        context.fillStyle = this.colours.ink;
        context.fillRect(left + at * this.#bar, 0, Math.max(1, this.#bar), Math.max(MARK, this.height - height));
      }
    });
  }

  #paintStep(context, step, x, height) {
    const weights = PARTS.map(([, weigh]) => weigh(step, this.chunkTokens));
    const whole = weights.reduce((sum, weight) => sum + weight, 0);
    let y = this.height;
    if (whole === 0) {
      context.fillStyle = this.colours.soft;
      context.fillRect(x, y - height, this.#bar, height);
    }
    weights.forEach((weight, part) => {
      if (weight === 0) return;
      const share = (weight / whole) * height;
      y -= share;
      context.fillStyle = PARTS[part][2];
      context.fillRect(x, y, this.#bar, share);
    });
  }

  /** Rare long steps are cut, so that the others can be read. */
  #mostSeconds() {
    const sorted = this.#steps.map(({ seconds }) => seconds).sort((one, other) => one - other);
    return sorted[Math.floor(SHOWN_SHARE * (sorted.length - 1))] || 1e-6;
  }

  hit({ offsetX }) {
    const at = Math.floor((offsetX - (this.width - this.#steps.length * this.#bar)) / this.#bar);
    return this.#steps[at] ?? null;
  }

  next(key) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (step === undefined || this.#steps.length === 0) return null;
    const last = this.#steps.length - 1;
    const at = this.chosen === null ? last : this.#steps.indexOf(this.chosen) + step;
    return this.#steps[Math.min(Math.max(at, 0), last)];
  }
}
