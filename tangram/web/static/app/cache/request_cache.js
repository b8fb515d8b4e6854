/** What the server says of one request's cache, and what follows for each token and head. */
import { KeptChunk } from "./kept.js";

/** What is known of a token: its cache entries do not exist yet, are uncompressed, … */
export const PENDING = 0;
export const RAW = 1;
export const SEALED = 2;
export const UNRECORDED = 3;
export const GONE = 4;

const KINDS = [
  "not in the cache yet",
  "not compressed",
  "sealed",
  "sealed, heads not recorded",
  "no longer in the cache",
];

/** What is known of a token, in words. */
export const spellKind = (kind) => KINDS[kind];

const FIRST_CAPACITY = 1024;

/** Grows with the request: give it each answer of GET /v1/kv/requests/{id} and each kept chunk. */
export class RequestCache {
  texts = [];
  /** As the server sent it last, without tokens. */
  view = null;
  /** What the prompt has lost; the same object while nothing of it changes. */
  reuse = null;
  /** Per token: one of PENDING … GONE, and the share of heads that hold it. */
  kinds = new Uint8Array(FIRST_CAPACITY);
  shares = new Float32Array(FIRST_CAPACITY);
  /** Whether what follows is of the entries that drafts read, instead of all that are held. */
  drafts = false;
  // Index to the KeptChunk that heads hold, and the one that drafts read, or null.
  #chunks = new Map();

  /** @param {object} model as GET /v1/kv/model says */
  constructor(model) {
    this.model = model;
    // Heads of layers with a window hold the same tokens, so they say nothing of a token.
    this.rows = model.full_layers.flatMap((layer) =>
      Array.from({ length: model.kv_heads }, (_, head) => layer * model.kv_heads + head),
    );
  }

  get tokens() {
    return this.texts.length;
  }

  /** Tokens with entries in the cache, sealed or raw. */
  get cachedTokens() {
    const there = this.view.chunks.filter(({ in: place }) => place !== "gone");
    return there.reduce((sum, { begin, end }) => sum + end - begin, this.rawTokens);
  }

  /** Tokens of the raw tail that are in the cache. */
  get rawTokens() {
    const { raw } = this.view;
    return this.#tailIsGone ? 0 : raw.end - raw.begin;
  }

  /** The prefix cache gives up the tail of an ended request before the chunk in front of it. */
  get #tailIsGone() {
    const { state, chunks } = this.view;
    return state === "ended" && chunks.length > 0 && chunks.at(-1).in !== "device";
  }

  /** Take an answer that was asked with `tokens_from` = `this.tokens` at the time. */
  take({ tokens, ...view }) {
    for (const { text } of tokens) this.texts.push(text);
    this.view = view;
    if (view.reuse?.lost_tokens !== this.reuse?.lost_tokens) this.reuse = view.reuse;
    this.#reserve(this.tokens);
    this.#sort();
  }

  /** Chunks of which more is recorded than is here, first to last. */
  missingChunks() {
    const misses = ({ index, recorded, drafts_recorded: drafts }) =>
      (recorded && !this.#chunks.has(index)) || (drafts && !this.#chunks.get(index).read);
    return (this.view?.chunks ?? []).filter(misses).map(({ index }) => index);
  }

  takeKept(index, kept) {
    const held = new KeptChunk(kept);
    const { draft_bits: bits } = kept;
    this.#chunks.set(index, { held, read: bits ? new KeptChunk({ ...kept, bits }) : null });
    this.#reserve(held.begin + held.tokens);
    this.#countShares(index);
    this.#sort();
  }

  /** See `drafts`. */
  showDrafts(drafts) {
    if (drafts === this.drafts) return;
    this.drafts = drafts;
    for (const index of this.#chunks.keys()) this.#countShares(index);
    if (this.view !== null) this.#sort();
  }

  /** What is told of now, as far as it is known. */
  #kept(index) {
    return this.#chunks.get(index)?.[this.drafts ? "read" : "held"] ?? null;
  }

  #countShares(index) {
    const kept = this.#kept(index);
    if (kept === null) return;
    const counts = kept.countByToken(this.rows);
    for (let at = 0; at < counts.length; at += 1) {
      this.shares[kept.begin + at] = counts[at] / this.rows.length;
    }
  }

  #reserve(tokens) {
    if (tokens <= this.kinds.length) return;
    const capacity = 2 ** Math.ceil(Math.log2(tokens));
    const kinds = new Uint8Array(capacity);
    const shares = new Float32Array(capacity);
    kinds.set(this.kinds);
    shares.set(this.shares);
    Object.assign(this, { kinds, shares });
  }

  /** Say for each token what is known of it. */
  #sort() {
    const { chunks, raw } = this.view;
    this.kinds.fill(PENDING);
    for (const { index, begin, end, in: place } of chunks) {
      const known = this.#kept(index) === null ? UNRECORDED : SEALED;
      this.kinds.fill(place === "gone" ? GONE : known, begin, end);
    }
    this.kinds.fill(this.#tailIsGone ? GONE : RAW, raw.begin, raw.end);
  }

  /** The share of heads that hold the token, or null where nobody knows. */
  share(position) {
    const kind = this.kinds[position];
    if (kind === SEALED) return this.shares[position];
    return kind === RAW ? 1 : null;
  }

  #chunkAt(position) {
    const chunk = this.view.chunks.find(({ begin, end }) => begin <= position && position < end);
    return chunk && { ...chunk, kept: this.#kept(chunk.index) };
  }

  /** Where the entries of a token are: "device", "host", or null without a chunk. */
  place(position) {
    return this.#chunkAt(position)?.in ?? null;
  }

  /** Whether the head of `row` (layer · heads + head) holds the token; null where nobody knows. */
  keeps(row, position) {
    const kind = this.kinds[position];
    if (kind === RAW) return true;
    if (kind !== SEALED) return null;
    const { index, kept } = this.#chunkAt(position);
    return index >= this.#firstHeld(row) && kept.keeps(row, position);
  }

  /** The first sealed chunk that a row holds: a layer with a window releases what none can see. */
  #firstHeld(row) {
    const window = this.model.windows[Math.floor(row / this.model.kv_heads)];
    if (window === null) return 0;
    const seen = Math.max(1, Math.ceil((window - 1) / this.model.chunk_tokens));
    return Math.max(0, this.view.chunks.length - seen);
  }

  /** The number of tokens that each head holds. @returns {Uint32Array} [layers · heads] */
  heldByRow() {
    const held = new Uint32Array(this.model.layers * this.model.kv_heads);
    if (this.view === null) return held;
    held.fill(this.rawTokens);
    const first = held.map((_, row) => this.#firstHeld(row));
    for (const { index, in: place } of this.view.chunks) {
      const counts = place === "gone" ? undefined : this.#kept(index)?.countsByRow;
      counts?.forEach((count, row) => (held[row] += index >= first[row] ? count : 0));
    }
    return held;
  }
}
