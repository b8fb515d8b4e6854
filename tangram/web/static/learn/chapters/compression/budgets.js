/** The pages that each head of a real profile keeps of a chunk, as ρ changes. */
import { deriveProfile, smallestRetention } from "../../math.js";
import {
  Choice,
  count,
  Figures,
  html,
  percent,
  RetentionSlider,
  shareGround,
  shareInk,
  useMemo,
} from "../../view.js";

/** [L][H]: pages of each head. */
export function pagesOfHeads(profile, retention) {
  const { groups, sealed_pages: pages } = deriveProfile(profile, retention);
  const row = new Map(profile.layers.map((layer, index) => [layer, index]));
  const found = profile.mean.map((heads) => heads.map(() => 0));
  groups.forEach((group, n) => {
    for (const [layer, head] of group) found[row.get(layer)][head] = pages[n];
  });
  return found;
}

function Grid({ pages, chunkPages, layers }) {
  const heads = pages[0].length;
  const cells = pages.flatMap((row, l) =>
    row.map((kept, h) => {
      const share = kept / chunkPages;
      return html`<g>
        <rect x=${l * 18} y=${h * 18} width="17" height="17" fill=${shareGround(share)}>
          <title>layer ${layers[l]}, head ${h}: ${kept} of ${chunkPages} pages</title>
        </rect>
        <text x=${l * 18 + 8.5} y=${h * 18 + 12} text-anchor="middle" fill=${shareInk(share)}
          >${kept}</text
        >
      </g>`;
    }),
  );
  const flat = pages.flat();
  const [least, most] = [Math.min(...flat), Math.max(...flat)];
  const label = `Pages kept by head: from ${least} to ${most} of ${chunkPages}`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Heads of all layers">
    <svg
      viewBox="0 0 ${layers.length * 18} ${heads * 18}"
      class="grid"
      role="img"
      aria-label=${label}
    >
      ${cells}
    </svg>
  </div>`;
}

export function Budgets({ profiles, number, onChoose, retention, onRetention }) {
  const profile = profiles[number];
  const chunkPages = profile.chunk_tokens / profile.page_tokens;
  const least = Math.ceil(smallestRetention(profile) * 100) / 100;
  const pages = useMemo(() => pagesOfHeads(profile, retention), [profile, retention]);
  const flat = pages.flat();
  const fewest = Math.min(...flat);
  const realised = flat.reduce((sum, kept) => sum + kept, 0) / (flat.length * chunkPages);
  const names = profiles.map((one, n) => [
    n,
    `${one.model}, ${one.scorer.name}, calibrated at ${one.kv_retention}`,
  ]);
  return html`<section aria-label="Budgets of heads">
    <h3>Budgets of heads</h3>
    <${Choice} label="Profile" value=${number} onChange=${onChoose} options=${names} />
    <${RetentionSlider}
      value=${retention}
      onChange=${onRetention}
      min=${least}
      max="0.99"
      step="0.01"
    />
    <${Figures}
      rows=${[
        ["Entries kept by heads", percent(realised)],
        ["Heads that keep all", count(flat.filter((kept) => kept === chunkPages).length)],
        [
          "Heads with the fewest pages",
          `${count(flat.filter((kept) => kept === fewest).length)}, ${fewest} each`,
        ],
      ]}
    />
    <${Grid} pages=${pages} chunkPages=${chunkPages} layers=${profile.layers} />
    <p class="legend">A column is a layer, a cell is a KV head and its pages of ${chunkPages}.</p>
    ${
      retention !== profile.kv_retention &&
      html`<p>
        The engine serves ρ ${profile.kv_retention} with this profile. Other ratios are shown with
        its statistics.
      </p>`
    }
  </section>`;
}
