/** Requests to the server that sent this page, and to no other. */
import { readEvents } from "./sse.js";

/** A refusal or a failure; `message` is the server's own sentence. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "tangram.key";

/** The API key: for this tab, or for this browser if the user wants that. */
export const keys = {
  get() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  get remembered() {
    return localStorage.getItem(KEY) !== null;
  },
  set(key, remember) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key !== "") (remember ? localStorage : sessionStorage).setItem(KEY, key);
  },
};

/**
 * `fetch` with the key.
 * @throws {ApiError} for any answer but 2xx, and with status 0 where there is no answer.
 */
async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (keys.get() !== "") headers.set("Authorization", `Bearer ${keys.get()}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await readFault(response));
  return response;
}

async function readFault(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.detail ?? text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

const CUT = "The connection ended before the answer did.";

/** The same events; a connection that breaks is told of in our words, as browsers' own differ. */
async function* untilBroken(events) {
  try {
    yield* events;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, CUT);
  }
}

const getJson = async (path) => (await ask(path)).json();
const nameRequest = (id) => `/v1/kv/requests/${encodeURIComponent(id)}`;

export const api = {
  models: () => getJson("/v1/models"),
  logbook: async () => (await ask("/page/demo_document.md")).text(),
  kvModel: () => getJson("/v1/kv/model"),
  pool: () => getJson("/v1/kv/pool"),
  history: (seconds) => getJson(`/v1/kv/history?seconds=${seconds}`),
  request: (id, tokensFrom = 0) => getJson(`${nameRequest(id)}?tokens_from=${tokensFrom}`),
  kept: (id, chunk) => getJson(`${nameRequest(id)}/kept?chunk=${chunk}`),

  /** Events of the cache, until `signal` aborts or the connection ends. */
  async *events(signal) {
    const response = await ask("/v1/kv/events", { signal });
    for await (const { event, data } of readEvents(response.body)) {
      yield { event, data: JSON.parse(data) };
    }
  },

  /**
   * A streamed chat answer: first `{requestId}`, then each chunk as the server sends it.
   * @throws {ApiError} also for a failure inside the stream.
   */
  async *chat(body, signal) {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        ...body,
        stream: true,
        stream_options: { include_usage: true },
      }),
      signal,
    });
    yield { requestId: response.headers.get("x-request-id") };
    for await (const { data } of untilBroken(readEvents(response.body))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield { chunk };
    }
    throw new ApiError(0, CUT);
  },
};
