/**
 * Asking for an answer, and writing it into the conversation as it comes.
 *
 * @typedef {object} Run how an answer came to be
 * @property {string|null} requestId the request's name at the server, known at once
 * @property {string|null} answerId the answer's id, known with its first token
 * @property {number|null} kvRetention as asked; null is the server's default
 * @property {number|null} firstTokenS from sending to the first token
 * @property {number|null} decodeS from the first token to the last that has come
 * @property {number|null} tokensPerS after the first token
 * @property {object|null} usage as the server counted; of a stopped answer what it says later
 * @property {number|null} [sealedChunks] chunks that the request sealed
 * @property {string|null} finish the server's reason, or "stopped"
 */
import { api } from "../api.js";
import { oncePerFrame } from "../frames.js";

const newRun = (kvRetention) => ({
  requestId: null,
  answerId: null,
  kvRetention: kvRetention ?? null,
  firstTokenS: null,
  decodeS: null,
  tokensPerS: null,
  usage: null,
  finish: null,
});

/**
 * Ask, and call `tell({content, thought, run})` at most once a frame, and at the end.
 * @param {object} body of the request
 * @param {AbortSignal} signal ends it; what has come stays, with `finish` "stopped"
 * @returns {Promise<Run>} how it came to be
 * @throws {ApiError}
 */
export async function streamAnswer(body, signal, tell) {
  const answer = { content: "", thought: "", run: newRun(body.kv_retention) };
  const tellNow = () => tell({ ...answer, run: { ...answer.run } });
  const tellSoon = oncePerFrame(() => !ended && tellNow());
  const clock = { begun: performance.now(), first: null, last: null };
  let ended = false;
  try {
    for await (const part of api.chat(body, signal)) {
      take(part, answer, clock);
      tellSoon();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.run.finish = "stopped";
  } finally {
    ended = true;
    tellNow();
  }
  return answer.run;
}

/** Tokens a second after the first, or null of a single one. */
export function speedOf({ usage, decodeS }) {
  const tokens = usage.completion_tokens - 1;
  return tokens > 0 && decodeS > 0 ? tokens / decodeS : null;
}

/** The usage of a request that GET /v1/kv/requests/{id} describes. */
export const usageOf = (view) => ({
  prompt_tokens: view.prompt_tokens,
  completion_tokens: view.output_tokens,
  prompt_tokens_details: { cached_tokens: view.cached_tokens },
  completion_tokens_details: view.drafted && {
    accepted_prediction_tokens: view.drafted.accepted,
    rejected_prediction_tokens: view.drafted.rejected,
  },
  kv_bytes: view.kv_bytes,
  kv_bytes_uncompressed: view.kv_bytes_uncompressed,
});

/** Add what one part of the stream says. */
function take({ requestId, chunk }, answer, clock) {
  const { run } = answer;
  if (chunk === undefined) {
    run.requestId = requestId;
    return;
  }
  run.answerId = chunk.id;
  if (chunk.usage) {
    run.usage = chunk.usage;
    run.tokensPerS = speedOf(run);
  }
  const choice = chunk.choices[0];
  if (choice === undefined) return;
  clock.last = performance.now();
  if (clock.first === null) {
    clock.first = clock.last;
    run.firstTokenS = (clock.first - clock.begun) / 1000;
  }
  run.decodeS = (clock.last - clock.first) / 1000;
  answer.content += choice.delta.content ?? "";
  answer.thought += choice.delta.reasoning_content ?? "";
  run.finish = choice.finish_reason ?? run.finish;
}
