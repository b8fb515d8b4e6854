/** The state of every page of the cache, kept up to date by events. */
import { decodeBytes } from "./kept.js";

/** States as the server numbers them; PROMISED pages are a count without places. */
export const FREE = 0;
export const PROMISED = 1;
export const KEPT_FOR_NOBODY = 5;
export const STATES = [
  "free",
  "promised",
  "raw tail",
  "sealed",
  "shared by several",
  "kept for nobody",
];

export class Pool {
  states = new Uint8Array(0);
  owners = new Uint16Array(0);
  /** When each page changed last, in the browser's milliseconds. */
  changedAt = new Float64Array(0);
  hostUsed = 0;
  hostTotal = 0;
  promised = 0;
  /** Number of a conversation to the id of its newest answer, if it is the client's own. */
  answers = new Map();

  /** Take the answer of GET /v1/kv/pool. */
  take(whole) {
    this.states = decodeBytes(whole.states);
    this.owners = new Uint16Array(decodeBytes(whole.owners).buffer);
    this.changedAt = new Float64Array(this.states.length).fill(-Infinity);
    this.hostUsed = whole.host_used;
    this.hostTotal = whole.host_total;
    this.promised = whole.promised;
    this.answers = new Map(whole.conversations.map(({ number, id }) => [number, id]));
  }

  /** An event has told of the newest answer of a conversation. */
  name(conversation, answerId) {
    this.answers.set(conversation, answerId);
  }

  /** Take an event `pool`. */
  change({ changes, host_used: hostUsed, promised }, now) {
    for (const [page, state, owner] of changes) {
      this.states[page] = state;
      this.owners[page] = owner;
      this.changedAt[page] = now;
    }
    this.hostUsed = hostUsed;
    this.promised = promised;
  }

  /** The state of each page as it is painted: the first that can be had stand for the promised. */
  painted() {
    const painted = this.states.slice();
    let left = this.promised;
    for (const state of [FREE, KEPT_FOR_NOBODY]) {
      for (let page = 0; page < painted.length && left > 0; page += 1) {
        if (painted[page] !== state) continue;
        painted[page] = PROMISED;
        left -= 1;
      }
    }
    return painted;
  }

  /** How many pages each conversation held last, the largest first: [number, pages]. */
  countByConversation() {
    const counts = new Map();
    this.owners.forEach((owner) => owner !== 0 && counts.set(owner, (counts.get(owner) ?? 0) + 1));
    return [...counts].sort(([, one], [, other]) => other - one);
  }

  /** How many pages are in each state. */
  counts() {
    const counts = new Array(STATES.length).fill(0);
    for (const state of this.painted()) counts[state] += 1;
    return counts;
  }
}
