/** Where tokens stand when their text is set in lines. Appending costs only what is appended. */

const FIRST_CAPACITY = 1024;
const MOST_WIDTHS = 50_000;

/** How a token is shown: line ends and characters without a shape get one. */
export function spell(text) {
  if (text === "") return "·";
  // eslint-disable-next-line no-control-regex
  return text.replaceAll("\n", "⏎").replaceAll("\t", "→").replace(/[\u0000-\u001f\u007f]/g, "·");
}

export class TextLayout {
  tokens = 0;
  /** Per token: its place in its line and its width, in pixels. */
  left = new Float32Array(FIRST_CAPACITY);
  widths = new Float32Array(FIRST_CAPACITY);
  /** The first token of each line. */
  starts = [0];
  #measured = new Map();
  #end = 0;
  #breaks = false;

  /**
   * @param {(text: string) => number} measure the width of a text in pixels
   * @param {number} width of a line
   */
  constructor(measure, width) {
    this.measure = measure;
    this.width = width;
  }

  get lines() {
    return this.starts.length;
  }

  /** Set the tokens of `texts` that are not set yet. */
  append(texts) {
    this.#reserve(texts.length);
    for (; this.tokens < texts.length; this.tokens += 1) this.#set(texts[this.tokens]);
  }

  #set(text) {
    const width = Math.min(this.#measure(spell(text)), this.width);
    if (this.#breaks || (this.#end > 0 && this.#end + width > this.width)) {
      this.starts.push(this.tokens);
      this.#end = 0;
    }
    this.left[this.tokens] = this.#end;
    this.widths[this.tokens] = width;
    this.#end += width;
    this.#breaks = text.includes("\n");
  }

  #measure(text) {
    let width = this.#measured.get(text);
    if (width === undefined) {
      if (this.#measured.size > MOST_WIDTHS) this.#measured.clear();
      width = this.measure(text);
      this.#measured.set(text, width);
    }
    return width;
  }

  #reserve(tokens) {
    if (tokens <= this.left.length) return;
    const capacity = 2 ** Math.ceil(Math.log2(tokens));
    const [left, widths] = [new Float32Array(capacity), new Float32Array(capacity)];
    left.set(this.left);
    widths.set(this.widths);
    Object.assign(this, { left, widths });
  }

  /** The first token after `line`. */
  end(line) {
    return line + 1 < this.lines ? this.starts[line + 1] : this.tokens;
  }

  /** The line of a token. */
  lineOf(token) {
    let [low, high] = [0, this.lines - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The token at `x` in `line`, or null. */
  tokenAt(line, x) {
    if (line < 0 || line >= this.lines) return null;
    for (let token = this.starts[line]; token < this.end(line); token += 1) {
      const from = this.left[token];
      if (x >= from && x < from + this.widths[token]) return token;
    }
    return null;
  }
}
