/** What each turn cost, as the server counted. */
import { bytes, count, percent, rate, seconds } from "../format.js";
import { html } from "../preact.js";

export function TurnsTable({ app, messages }) {
  const turns = messages.filter(({ run }) => run?.usage);
  if (turns.length === 0) {
    return html`<p class="caption">No turn has ended yet.</p>`;
  }
  const drafts = turns.some(({ run }) => draftsOf(run) !== null);
  return html`<div class="table-frame" tabindex="0">
    <table class="turns">
      <thead>
        <tr>
          ${["Turn", "Reused", "Computed", "Sealed chunks", "First token", "Speed", "Held", "Uncompressed"].map(
            (name) => html`<th scope="col">${name}</th>`,
          )}
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
  </div>`;
}

/** Accepted and rejected drafted tokens, or null without speculation. */
function draftsOf({ usage }) {
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
    <td>${seconds(run.firstTokenS)}</td>
    <td>${rate(run.tokensPerS)}</td>
    <td>${bytes(usage.kv_bytes)} (${percent(usage.kv_bytes / usage.kv_bytes_uncompressed)})</td>
    <td>${bytes(usage.kv_bytes_uncompressed)}</td>
    ${drafts &&
    html`<td>
      ${drafted ? `${count(drafted.accepted)} of ${count(drafted.accepted + drafted.rejected)}` : "–"}
    </td>`}
  </tr>`;
}
