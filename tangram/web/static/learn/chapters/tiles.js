/** The score matrix of causal attention in tiles. */
import { countSharedBytes, countTiles } from "../math.js";
import {
  bytes,
  Choice,
  count,
  Figures,
  html,
  percent,
  powers,
  Slider,
  useState,
  withData,
} from "../view.js";

const SHOWN = 24;

/** The tiles of a matrix of `tokens` by `tokens`; a large one is drawn with fewer, larger tiles. */
function Matrix({ tokens, tile }) {
  const side = Math.min(SHOWN, Math.ceil(tokens / tile));
  const cells = [];
  for (let row = 0; row < side; row += 1) {
    for (let column = 0; column < side; column += 1) {
      const kind = column > row ? "hidden" : column === row ? "diagonal" : "whole";
      cells.push(html`<rect class=${kind} x=${column * 10} y=${row * 10} width="9" height="9" />`);
    }
  }
  const label = `Tiles on and below the diagonal are computed, those above are skipped`;
  return html`<svg
    viewBox="0 0 ${side * 10} ${side * 10}"
    class="matrix"
    role="img"
    aria-label=${label}
  >
    ${cells}
  </svg>`;
}

function Tiles({ cards: { cards } }) {
  const [tokens, setTokens] = useState(8192);
  const [tile, setTile] = useState(64);
  const [dim, setDim] = useState(128);
  const { all, computed } = countTiles(tokens, tile, tile);
  const card = cards.find((one) => one.name === "H100 SXM");
  const operands = { head_dim: dim, element_bytes: 2, hops: 2, widens: false };
  const shared = countSharedBytes(
    { queries: tile, entries: tile, warps: 4, stages: 2 },
    operands,
    card,
  );
  return html`<div>
    <${Slider}
      label="Tokens"
      value=${tokens}
      onChange=${setTokens}
      values=${powers(64, 131072)}
      format=${count}
    />
    <${Choice}
      label="Side of a tile"
      value=${tile}
      onChange=${setTile}
      options=${[16, 32, 64, 128]}
    />
    <${Choice}
      label="Dimensions of a head"
      value=${dim}
      onChange=${setDim}
      options=${[64, 128, 256]}
    />
    <${Figures}
      rows=${[
        ["Scores of one head, whole", bytes(4 * tokens * tokens)],
        ["Shared memory of a program", `${bytes(shared)} of ${bytes(card.shared_bytes)}`],
        ["Tiles of the matrix", count(all)],
        ["Computed", `${count(computed)} (${percent(computed / all)})`],
      ]}
    />
    ${
      shared > card.shared_bytes &&
      html`<p>This tile does not fit: an H100 would take a smaller one.</p>`
    }
    <${Matrix} tokens=${tokens} tile=${tile} />
    <p class="legend">
      <span class="key whole-tile"></span> computed
      <span class="key diagonal-tile"></span> computed, partly hidden
      <span class="key hidden-tile"></span> skipped; the picture has at most ${SHOWN} tiles a side
    </p>
  </div>`;
}

export const Widget = withData(["cards"], Tiles);
