/** The conversation's text, every token painted by the share of heads that hold it. */
import { ChoicePicture } from "./canvas.js";
import { shareGround, shareInk } from "./palette.js";
import { GONE, PENDING, RAW } from "./request_cache.js";
import { TextLayout, spell } from "./text_layout.js";

const FONT = "13px system-ui, sans-serif";
const LINE = 20;
const BASELINE = 14;
const MARGIN = 8;
const NEAR_END = 2 * LINE;

/**
 * A canvas that stands still in a frame that scrolls; only visible lines are drawn. A token is
 * chosen by its position.
 */
export class TextMap extends ChoicePicture {
  #cache = null;
  #layout = null;
  #row = null;

  constructor(canvas, frame, spacer, onToken) {
    super(canvas, frame, onToken);
    this.spacer = spacer;
    frame.addEventListener("scroll", this.change, { passive: true });
    this.fit();
  }

  /** Show `cache`, a RequestCache, or nothing; call it again when the cache has grown. */
  show(cache) {
    const begins = cache !== this.#cache;
    const follows = begins ? cache?.view?.state !== "ended" : this.#atEnd();
    if (begins) this.#layout = null;
    this.#cache = cache;
    this.#set();
    if (follows) this.frame.scrollTop = this.frame.scrollHeight;
    else if (begins) this.frame.scrollTop = 0;
    this.change();
  }

  /** Show the tokens of one head, or the shares again with null. */
  showHead(row) {
    this.#row = row;
    this.change();
  }

  resize() {
    this.#layout = null;
    this.#set();
  }

  #set() {
    if (this.#cache === null || this.width === 0) {
      this.spacer.style.height = "0";
      return;
    }
    if (this.#layout === null) {
      this.context.font = FONT;
      const measure = (text) => this.context.measureText(text).width;
      this.#layout = new TextLayout(measure, this.width - 2 * MARGIN);
    }
    this.context.font = FONT;
    this.#layout.append(this.#cache.texts);
    const whole = this.#layout.lines * LINE + 2 * MARGIN;
    this.spacer.style.height = `${Math.max(0, whole - this.height)}px`;
  }

  #atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.frame;
    return scrollTop + clientHeight >= scrollHeight - NEAR_END;
  }

  paint(context) {
    context.fillStyle = this.colours.panel;
    context.fillRect(0, 0, this.width, this.height);
    if (this.#layout === null) return;
    context.font = FONT;
    context.textBaseline = "alphabetic";
    const top = this.frame.scrollTop - MARGIN;
    const first = Math.max(0, Math.floor(top / LINE));
    const last = Math.min(this.#layout.lines - 1, Math.floor((top + this.height) / LINE));
    for (let line = first; line <= last; line += 1) {
      const y = line * LINE - top;
      for (let at = this.#layout.starts[line]; at < this.#layout.end(line); at += 1) {
        this.#paintToken(context, at, y);
      }
    }
  }

  #paintToken(context, at, y) {
    const x = MARGIN + this.#layout.left[at];
    const width = this.#layout.widths[at];
    const { ground, ink } = this.#colour(at);
    if (ground !== null) {
      context.fillStyle = ground;
      context.fillRect(x, y + 1, width, LINE - 2);
    }
    context.fillStyle = ink;
    context.fillText(spell(this.#cache.texts[at]), x, y + BASELINE, this.#layout.width);
    if (this.#row === null && this.#cache.kinds[at] === RAW) {
      context.fillRect(x, y + LINE - 4, width, 1);
    }
    if (at === this.chosen) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.strokeRect(x, y + 1, width, LINE - 2);
    }
  }

  #colour(at) {
    const { kinds } = this.#cache;
    if (kinds[at] === PENDING) return { ground: null, ink: this.colours.soft };
    if (kinds[at] === GONE) return { ground: null, ink: this.colours.soft };
    if (this.#row !== null) {
      const kept = this.#cache.keeps(this.#row, at);
      if (kept === true) return { ground: this.colours.accent, ink: this.colours.panel };
      return { ground: null, ink: this.colours.soft };
    }
    const share = this.#cache.share(at);
    if (share === null) return { ground: this.colours.unknown, ink: this.colours.ink };
    return { ground: shareGround(share), ink: shareInk(share) };
  }

  hit(event) {
    if (this.#layout === null) return null;
    const y = event.offsetY + this.frame.scrollTop - MARGIN;
    return this.#layout.tokenAt(Math.floor(y / LINE), event.offsetX - MARGIN);
  }

  next(key) {
    const next = this.#layout?.tokens > 0 ? this.#next(key) : null;
    if (next !== null) this.#reveal(next);
    return next;
  }

  #reveal(token) {
    const y = this.#layout.lineOf(token) * LINE;
    const { scrollTop, clientHeight } = this.frame;
    if (y < scrollTop) this.frame.scrollTop = y;
    if (y + 2 * LINE > scrollTop + clientHeight) this.frame.scrollTop = y + 2 * LINE - clientHeight;
  }

  #next(key) {
    const layout = this.#layout;
    const last = layout.tokens - 1;
    const now = this.chosen ?? -1;
    const line = layout.lineOf(Math.max(now, 0));
    const across = (to) => {
      const from = now < 0 ? 0 : layout.left[now];
      return layout.tokenAt(to, from) ?? layout.end(to) - 1;
    };
    switch (key) {
      case "ArrowRight":
        return Math.min(now + 1, last);
      case "ArrowLeft":
        return Math.max(now - 1, 0);
      case "ArrowDown":
        return line + 1 < layout.lines ? across(line + 1) : last;
      case "ArrowUp":
        return line > 0 ? across(line - 1) : 0;
      case "Home":
        return 0;
      case "End":
        return last;
      default:
        return null;
    }
  }
}
