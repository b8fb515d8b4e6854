/** Which heads of which layers keep which tokens of a sealed chunk. */

/** @returns {Uint8Array} the bytes of `base64` */
export function decodeBytes(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

/** The bits of one chunk: row l·H + h is head h of layer l, column t is token begin + t. */
export class KeptChunk {
  /** @param {{begin: number, tokens: number, layers: number, kv_heads: number, bits: string}} kept */
  constructor(kept) {
    this.begin = kept.begin;
    this.tokens = kept.tokens;
    this.rows = kept.layers * kept.kv_heads;
    this.#bits = decodeBytes(kept.bits);
    /** How many tokens each row keeps. */
    this.countsByRow = this.#countByRow();
  }

  #bits;

  /** Whether the head of `row` keeps the token at `position`, counted from the prompt's first. */
  keeps(row, position) {
    const bit = row * this.tokens + position - this.begin;
    return ((this.#bits[bit >> 3] >> (bit & 7)) & 1) === 1;
  }

  /** How many of `rows` keep each token. @returns {Uint16Array} */
  countByToken(rows) {
    const counts = new Uint16Array(this.tokens);
    for (const row of rows) {
      const first = row * this.tokens;
      for (let at = 0; at < this.tokens; at += 1) {
        const bit = first + at;
        counts[at] += (this.#bits[bit >> 3] >> (bit & 7)) & 1;
      }
    }
    return counts;
  }

  #countByRow() {
    const counts = new Uint32Array(this.rows);
    for (let row = 0; row < this.rows; row += 1) {
      for (let at = 0; at < this.tokens; at += 1) {
        if (this.keeps(row, this.begin + at)) counts[row] += 1;
      }
    }
    return counts;
  }
}
