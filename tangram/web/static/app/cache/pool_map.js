/** The pool as a map of pages. A page that changes lights up and fades. A cell can be chosen. */
import { ChoicePicture } from "./canvas.js";
import { conversationColour } from "./palette.js";
import { FREE, KEPT_FOR_NOBODY, PROMISED } from "./pool.js";

const MOST_CELL = 14;
const LEAST_CELL = 3;
const LEAST_GAPPED = 5;
const MOST_HEIGHT = 220;
const FADE_MS = 700;
const still = globalThis.matchMedia?.("(prefers-reduced-motion: reduce)");
/** One colour a state, told apart by lightness, too. */
export const STATE_COLOURS = ["", "#8a7fb5", "#e69f00", "#0072b2", "#009e73", "#999999"];
const RAW_TAIL = 2;
const SHARED = 4;
// Of a conversation's colour: the tail is lighter, what several read darker, what nobody paler.
const SHADES = {
  [RAW_TAIL]: { light: 72 },
  [SHARED]: { light: 32 },
  [KEPT_FOR_NOBODY]: { strong: 22, light: 56 },
};

export class PoolMap extends ChoicePicture {
  #pool = null;
  #pages = 0;
  #byConversation = false;
  /** The colour that each cell has on the canvas; null while a cell is lit. */
  #drawn = [];
  #drawnColours = null;

  /** Show `pool`; call it again when it has changed. */
  show(pool) {
    this.#pool = pool;
    if (pool.states.length !== this.#pages) {
      this.choose(null);
      this.fit();
    }
    this.change();
  }

  /** Colour pages by conversation instead of state. */
  colourBy(conversation) {
    this.#byConversation = conversation;
    this.change();
  }

  /** Cells are as large as the space lets them be; of a large pool several pages share one. */
  fit() {
    const pages = this.#pool?.states.length ?? 0;
    this.#pages = pages;
    const width = this.frame.clientWidth;
    const ideal = Math.floor(Math.sqrt((width * MOST_HEIGHT) / Math.max(pages, 1)));
    this.cell = Math.min(MOST_CELL, Math.max(LEAST_CELL, ideal));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const cells = this.columns * Math.floor(MOST_HEIGHT / this.cell);
    this.pagesPerCell = Math.max(1, Math.ceil(pages / cells));
    this.#drawn = [];
    super.fit(Math.ceil(pages / this.pagesPerCell / this.columns) * this.cell);
    this.change();
  }

  choose(part) {
    if (part !== this.chosen) this.#drawn = [];
    super.choose(part);
  }

  /** Cells that look as they did are not drawn again: a large pool has thousands. */
  paint(context) {
    if (this.#drawn.length === 0 || this.colours !== this.#drawnColours) {
      this.#drawn = [];
      this.#drawnColours = this.colours;
      context.clearRect(0, 0, this.width, this.height);
    }
    if (this.#pool === null) return;
    const painted = this.#pool.painted();
    const now = performance.now();
    const moves = !still?.matches;
    const size = this.cell < LEAST_GAPPED ? this.cell : this.cell - 1;
    let fades = false;
    for (let cell = 0; cell * this.pagesPerCell < painted.length; cell += 1) {
      const page = this.#pageOf(cell, painted);
      const colour = this.#colour(painted[page], this.#pool.owners[page]);
      const light = moves ? 1 - (now - this.#pool.changedAt[page]) / FADE_MS : 0;
      if (light <= 0 && this.#drawn[cell] === colour) continue;
      this.#drawn[cell] = light > 0 ? null : colour;
      const box = this.#boxOf(cell, size);
      context.fillStyle = colour;
      context.fillRect(...box);
      if (light > 0) {
        fades = true;
        context.globalAlpha = light;
        context.fillStyle = this.colours.ink;
        context.fillRect(...box);
        context.globalAlpha = 1;
      }
    }
    this.#outline(context, size);
    if (fades) this.change();
  }

  /** Whole pixels of the screen: edges that were blended would show what was there before. */
  #boxOf(cell, size) {
    const whole = (length) => Math.round(length * this.ratio) / this.ratio;
    const [x, y] = [(cell % this.columns) * this.cell, Math.floor(cell / this.columns) * this.cell];
    return [whole(x), whole(y), whole(x + size) - whole(x), whole(y + size) - whole(y)];
  }

  #outline(context, size) {
    if (this.chosen === null) return;
    const [column, row] = [this.chosen % this.columns, Math.floor(this.chosen / this.columns)];
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(column * this.cell, row * this.cell, size, size);
  }

  get #cells() {
    return Math.ceil(this.#pages / this.pagesPerCell);
  }

  hit({ offsetX, offsetY }) {
    const [column, row] = [Math.floor(offsetX / this.cell), Math.floor(offsetY / this.cell)];
    const cell = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && cell < this.#cells ? cell : null;
  }

  next(key) {
    const { columns } = this;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[key];
    if (step === undefined || this.#cells === 0) return null;
    const next = this.chosen === null ? 0 : this.chosen + step;
    return next >= 0 && next < this.#cells ? next : this.chosen;
  }

  /** The pages of a cell, first and last, and the one whose colour it has. */
  pagesOf(cell) {
    const first = cell * this.pagesPerCell;
    const last = Math.min(first + this.pagesPerCell, this.#pages) - 1;
    return { first, last, shown: this.#pageOf(cell, this.#pool.painted()) };
  }

  /** The page that speaks for a cell: the one that changed last, else the first in use. */
  #pageOf(cell, painted) {
    const { changedAt } = this.#pool;
    const first = cell * this.pagesPerCell;
    const end = Math.min(first + this.pagesPerCell, painted.length);
    let chosen = first;
    for (let page = first + 1; page < end; page += 1) {
      const later = changedAt[page] > changedAt[chosen];
      const same = changedAt[page] === changedAt[chosen];
      if (later || (same && painted[chosen] === FREE)) chosen = page;
    }
    return chosen;
  }

  #colour(state, owner) {
    if (state === FREE) return this.colours.unknown;
    if (!this.#byConversation || owner === 0 || state === PROMISED) return STATE_COLOURS[state];
    return conversationColour(owner, SHADES[state]);
  }
}
