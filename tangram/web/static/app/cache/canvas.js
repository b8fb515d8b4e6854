/** What the canvases of the cache share. */
import { oncePerFrame } from "../frames.js";
import { onTheme, themeColours } from "../theme.js";

/**
 * A canvas that fills its frame, in the pixels of the screen. Subclasses have `paint(context)`,
 * which is called at most once a frame after `change()`, and `resize()` if the size matters to
 * them. `close()` ends it.
 */
export class Picture {
  width = 0;
  height = 0;
  #observer;
  #offTheme;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} frame whose size it takes
   */
  constructor(canvas, frame) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.colours = themeColours();
    this.change = oncePerFrame(() => this.#draw());
    this.frame = frame;
    this.#observer = new ResizeObserver(() => this.fit());
    this.#observer.observe(frame);
    this.#offTheme = onTheme(() => {
      this.colours = themeColours();
      this.change();
    });
  }

  /** Take the size of the frame, or `height` pixels. */
  fit(height = this.frame.clientHeight) {
    const { clientWidth: width } = this.frame;
    const ratio = devicePixelRatio || 1;
    if (width === this.width && height === this.height && ratio === this.ratio) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.resize();
    this.change();
  }

  resize() {}

  #draw() {
    if (this.width === 0 || this.height === 0) return;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.paint(this.context);
  }

  close() {
    this.#observer.disconnect();
    this.#offTheme();
    this.paint = () => {};
  }
}

/**
 * A picture whose parts can be pointed at, touched, or chosen with keys. `onChoice(part|null)` is
 * called when another is chosen. Subclasses have `hit(event)`, the part at a place or null, and
 * `next(key)`, the part that a key leads to or null.
 */
export class ChoicePicture extends Picture {
  chosen = null;

  constructor(canvas, frame, onChoice) {
    super(canvas, frame);
    this.onChoice = onChoice;
    canvas.addEventListener("pointermove", (event) => this.choose(this.hit(event)));
    canvas.addEventListener("pointerdown", (event) => this.choose(this.hit(event)));
    canvas.addEventListener("pointerleave", ({ pointerType }) => {
      // A finger that is lifted leaves; what it has chosen stays.
      if (pointerType === "mouse") this.choose(null);
    });
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  choose(part) {
    if (part === this.chosen) return;
    this.chosen = part;
    this.onChoice(part);
    this.change();
  }

  #step(event) {
    const next = this.next(event.key);
    if (next === null) return;
    event.preventDefault();
    this.choose(next);
  }
}
