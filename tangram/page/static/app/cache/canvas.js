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
