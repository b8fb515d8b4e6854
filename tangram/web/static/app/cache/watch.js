/** Follows the engine's events, and the cache of the request that is shown. */
import { api } from "../api.js";
import { Store } from "../store.js";
import { Pool } from "./pool.js";
import { RequestCache } from "./request_cache.js";
import { Steps } from "./timeline.js";

const RETRY_MS = [500, 1000, 2000, 5000];
// A view may be this much older than an event; asking more often costs the server for nothing.
const LEAST_PAUSE_MS = 40;
const CHUNKS_AT_ONCE = 8;
// No key, no right, or a server whose caches are not shown: asking again changes nothing.
const FINAL = [401, 403, 404];
const MOST_HEARD = 256;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * `status` is a store of `{model, connected, fault}`; `model` is what GET /v1/kv/model says.
 * Pictures listen with `on(kind, listener)`: kinds are "pool", "steps" and "request".
 */
export class CacheWatch {
  status = new Store({ model: null, connected: false, fault: null });
  pool = new Pool();
  steps = new Steps();
  /** The RequestCache that is shown, or null. */
  cache = null;
  /** Whether the server knows nothing of the request that was asked for. */
  forgotten = false;
  #listeners = { pool: new Set(), steps: new Set(), request: new Set() };
  #shown = null;
  // Another object for each request that is shown, so that no late answer is taken for another's.
  #turn = {};
  #names = new Set();
  // Names of requests that the server has told of, the newest last.
  #heard = new Set();
  #stale = false;
  #refreshing = false;
  #connection = null;

  /** @returns {() => void} ends the subscription */
  on(kind, listener) {
    this.#listeners[kind].add(listener);
    return () => this.#listeners[kind].delete(listener);
  }

  #tell(kind) {
    for (const listener of this.#listeners[kind]) listener();
  }

  /** Connect, again and again if need be, until the next `connect`. */
  async connect() {
    this.#connection?.abort();
    const connection = new AbortController();
    this.#connection = connection;
    for (let tried = 0; !connection.signal.aborted; tried += 1) {
      try {
        this.status.set({ model: await api.kvModel(), fault: null });
        for await (const { event, data } of api.events(connection.signal)) {
          if (event === "hello") {
            tried = 0;
            await this.#begin();
          }
          this.#take(event, data);
        }
      } catch (error) {
        if (connection.signal.aborted) return;
        this.status.set({ fault: error.message });
        if (FINAL.includes(error.status)) {
          this.status.set({ connected: false });
          return;
        }
      }
      this.status.set({ connected: false });
      await pause(RETRY_MS[Math.min(tried, RETRY_MS.length - 1)]);
    }
  }

  async #begin() {
    this.status.set({ connected: true, fault: null });
    await this.#readPool();
    this.#refresh();
  }

  async #readPool() {
    const pool = await api.pool();
    this.pool.take(pool);
    for (const { id, request_id: requestId } of pool.conversations) this.#hear(id, requestId);
    this.#tell("pool");
  }

  #take(event, data) {
    if (event === "hello") {
      this.steps.replace(data.last_steps);
      this.#tell("steps");
    } else if (event === "step") {
      this.steps.add(data);
      this.#tell("steps");
    } else if (event === "pool") {
      this.pool.change(data, performance.now());
      this.#tell("pool");
    } else if (event === "request") {
      this.pool.name(data.conversation, data.id);
      this.#hear(data.id, data.request_id);
      if (this.#names.has(data.id) || this.#names.has(data.request_id)) this.#refresh();
    } else if (event === "lost") {
      this.#readPool().catch(({ message }) => this.status.set({ fault: message }));
      this.#refresh();
    }
  }

  #hear(...names) {
    for (const name of names) {
      if (name === null) continue; // it is another client's
      this.#heard.delete(name);
      this.#heard.add(name);
    }
    for (const name of this.#heard) {
      if (this.#heard.size <= MOST_HEARD) break;
      this.#heard.delete(name);
    }
  }

  /** The one of `names` by which the server knows a request, as far as it has told. */
  heardOf(...names) {
    return names.findLast((name) => this.#heard.has(name)) ?? null;
  }

  /**
   * Show the cache of the request with these `names`, its own id and its answer's. A name that is
   * not known yet is null; without any nothing is shown.
   */
  show(...names) {
    this.follow(...names);
    this.#refresh();
  }

  /** The same for a request just sent: nothing is asked until the server has told of it. */
  follow(...names) {
    const known = names.filter((name) => name !== null && name !== undefined);
    const goesOn = known.some((each) => this.#names.has(each));
    this.#names = new Set(known);
    this.#shown = known.at(-1) ?? null;
    if (goesOn) return;
    this.#turn = {};
    this.cache = null;
    this.forgotten = false;
    this.#tell("request");
    if (this.heardOf(...known) !== null) this.#refresh();
  }

  /** Ask for what is new of the shown request, now or as soon as the last answer is here. */
  async #refresh() {
    this.#stale = true;
    if (this.#refreshing) return;
    this.#refreshing = true;
    try {
      while (this.#stale && this.#shown !== null && this.status.value.model !== null) {
        this.#stale = false;
        const begun = performance.now();
        await this.#readRequest(this.#shown);
        const left = LEAST_PAUSE_MS - (performance.now() - begun);
        if (this.#stale && left > 0) await pause(left);
      }
    } finally {
      this.#refreshing = false;
    }
  }

  async #readRequest(name) {
    const turn = this.#turn;
    try {
      const cache = this.cache ?? new RequestCache(this.status.value.model);
      const view = await api.request(name, cache.tokens);
      if (turn !== this.#turn) return;
      cache.take(view);
      this.cache = cache;
      this.#tell("request");
      await this.#readChunks(name, cache);
    } catch (error) {
      // A request may not have begun, or is forgotten; what is known of it stays on the screen.
      if (error.status !== 404) this.status.set({ fault: error.message });
      else if (turn === this.#turn) {
        this.forgotten = this.cache === null;
        this.#tell("request");
      }
    }
  }

  /** Read some of the chunks that are missing; the others after the next look at the request. */
  async #readChunks(name, cache) {
    const missing = cache.missingChunks();
    if (missing.length === 0) return;
    const read = async (index) => cache.takeKept(index, await api.kept(name, index));
    await Promise.all(missing.slice(0, CHUNKS_AT_ONCE).map(read));
    if (cache !== this.cache) return;
    this.#tell("request");
    this.#stale ||= missing.length > CHUNKS_AT_ONCE;
  }
}
