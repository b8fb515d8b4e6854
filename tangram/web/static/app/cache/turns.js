/** What each turn cost, as the server counted. */
import { bytes, count, seconds } from "../format.js";
import { html } from "../preact.js";

const COLUMNS = [
  ["Turn", "Its button shows its cache above"],
  ["Reused", "Tokens of the prompt that were found in the cache"],
  ["Computed", "The other tokens of the prompt"],
  ["Sealed", "Chunks that the turn compressed"],
  ["First", "Time to the first token"],
  ["Tokens/s", "After the first token"],
  ["Held", "Memory of the KV cache at the end"],
  ["Whole", "What an uncompressed cache would hold"],
];

export function TurnsTable({ app, messages }) {
  const turns = messages.filter(({ run }) => run?.usage);
  if (turns.length === 0) {
    return html`<p class="caption">No turn has ended yet.</p>`;
  }
  const drafts = turns.some(({ run }) => draftsOf(run) !== null);
  const more = turns.some(({ run: { usage } }) => usage.kv_bytes > usage.kv_bytes_uncompressed);
  return html`<div class="table-frame" tabindex="0">
    <table class="turns">
      <thead>
        <tr>
          ${COLUMNS.map(([name, meaning]) => html`<th scope="col" title=${meaning}>${name}</th>`)}
          ${drafts && html`<th scope="col">Drafts kept</th>`}
        </tr>
      </thead>
      <tbody>
        ${turns.map(
          (message, at) =>
            html`<${Turn} key=${message.id} app=${app} message=${message} number=${at + 1} drafts=${drafts} />`,
        )}
      </tbody>
    </table>
    ${more && html`<p class="caption">Where a turn holds more than the whole, its pages are not full.</p>`}
  </div>`;
}

/** Accepted and rejected drafted tokens, or null without speculation. */
export function draftsOf({ usage }) {
  const details = usage.completion_tokens_details ?? {};
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = details;
  return accepted === undefined || rejected === undefined ? null : { accepted, rejected };
}

function Turn({ app, message, number, drafts }) {
  const { run } = message;
  const { usage } = run;
  const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const drafted = draftsOf(run);
  return html`<tr>
    <th scope="row">
      <button onClick=${() => app.watchAnswer(message)} aria-label=${`Show the cache of turn ${number}`}>
        ${number}
      </button>
    </th>
    <td data-name="reused">${count(reused)}</td>
    <td data-name="computed">${count(usage.prompt_tokens - reused)}</td>
    <td data-name="sealed">${count(run.sealedChunks)}</td>
    <td data-name="first">${seconds(run.firstTokenS)}</td>
    <td data-name="rate">${run.tokensPerS?.toFixed(1) ?? "–"}</td>
    <td data-name="held">${bytes(usage.kv_bytes)}</td>
    <td data-name="whole">${bytes(usage.kv_bytes_uncompressed)}</td>
    ${drafts &&
    html`<td>
      ${drafted ? `${count(drafted.accepted)} of ${count(drafted.accepted + drafted.rejected)}` : "–"}
    </td>`}
  </tr>`;
}
