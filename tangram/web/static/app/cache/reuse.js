/** Why less of a prompt was reused than could have been, and both texts around the place. */
import { splitAtDifference } from "../compare/first_difference.js";
import { count } from "../format.js";
import { html } from "../preact.js";

const WHY = {
  evicted: "they were evicted from the prefix cache",
  stateless: "the recurrent state behind their KV entries was not kept",
};

/** @param {object|null} reuse as GET /v1/kv/requests/{id} says */
export function Reuse({ reuse }) {
  if (!reuse?.lost_tokens) return null;
  const tokens = `${count(reuse.lost_tokens)} tokens were computed again: `;
  if (reuse.reason !== "diverged") {
    return html`<p class="caption">${tokens}${WHY[reuse.reason]}.</p>`;
  }
  const { before, earlier, now, at_token: at } = reuse;
  const sides = splitAtDifference(before + earlier, before + now);
  return html`<p class="caption">
      ${tokens}the prompt differs at token ${count(at)} from an earlier conversation.
    </p>
    <div class="sides">
      ${["Earlier", "Now"].map(
        (name, side) => html`<article aria-label=${`${name}, around token ${at}`}>
          <h3>${name}</h3>
          <div class="words">
            ${sides[side].same}${sides[side].word && html`<mark>${sides[side].word}</mark>`}${sides[side].rest}
          </div>
        </article>`,
      )}
    </div>`;
}
