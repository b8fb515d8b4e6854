/** The last steps of the engine: how long each took, and what it consisted of. */
import { Picture } from "./canvas.js";

const MOST_STEPS = 400;
const HEIGHT = 110;
const SHOWN_SHARE = 0.98;

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

/** A bar a step. `onStep(step|null)` is called when the pointer or the keyboard goes to another. */
export class Timeline extends Picture {
  #steps = [];
  #at = null;

  constructor(canvas, frame, chunkTokens, onStep) {
    super(canvas, frame);
    this.chunkTokens = chunkTokens;
    this.onStep = onStep;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#hit(event.offsetX)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#step(event));
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
      if (at === this.#at) {
        context.fillStyle = this.colours.ink;
        context.fillRect(left + at * this.#bar, 0, Math.max(1, this.#bar), this.height - height);
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

  #hit(x) {
    const at = Math.floor((x - (this.width - this.#steps.length * this.#bar)) / this.#bar);
    return at >= 0 && at < this.#steps.length ? at : null;
  }

  #point(at) {
    this.#at = at;
    this.onStep(at === null ? null : this.#steps[at]);
    this.change();
  }

  #step({ key }) {
    const last = this.#steps.length - 1;
    if (last < 0) return;
    if (key === "ArrowLeft") this.#point(Math.max(0, (this.#at ?? last + 1) - 1));
    if (key === "ArrowRight") this.#point(Math.min(last, (this.#at ?? last - 1) + 1));
  }
}
