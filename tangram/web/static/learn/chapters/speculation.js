/** What drafts yield, by acceptance and by their number. */
import { bestDrafts, expectedTokens, speedUp } from "../math.js";
import {
  count,
  Figures,
  fixed,
  html,
  Origin,
  percent,
  Slider,
  Table,
  useState,
  withData,
} from "../view.js";

const MOST = 16;
const [WIDTH, HEIGHT, LEFT, BOTTOM] = [600, 220, 62, 44];

function Curve({ share, drafted, draftCost, checkCost }) {
  const gains = Array.from({ length: MOST + 1 }, (_, n) => speedUp(share, n, draftCost, checkCost));
  const top = Math.max(2, ...gains);
  const x = (n) => LEFT + (n / MOST) * (WIDTH - LEFT - 10);
  const y = (gain) => 8 + (1 - gain / top) * (HEIGHT - BOTTOM - 8);
  const below = HEIGHT - BOTTOM + 20;
  const line = gains.map((gain, n) => `${x(n)},${y(gain)}`).join(" ");
  const label = `Speed-up by the number of drafts; ${drafted} drafts: ${gains[drafted].toFixed(2)}`;
  return html`<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" class="chart" role="img" aria-label=${label}>
    <g class="axes">
      <line x1=${LEFT} x2=${WIDTH - 10} y1=${y(1)} y2=${y(1)} />
      <text x=${LEFT - 6} y=${y(1) + 4} text-anchor="end">1 ×</text>
      <text x=${LEFT - 6} y=${y(top) + 8} text-anchor="end">${top.toFixed(1)} ×</text>
      ${[0, 4, 8, 12, 16].map(
        (n) => html`<text x=${x(n)} y=${below} text-anchor="middle">${n}</text>`,
      )}
      <text x=${(WIDTH + LEFT) / 2} y=${HEIGHT - 2} text-anchor="middle">drafts γ</text>
    </g>
    <polyline class="roof" points=${line} />
    <circle class="step" cx=${x(drafted)} cy=${y(gains[drafted])} r="6" />
  </svg>`;
}

function Speculation({ acceptance }) {
  const [share, setShare] = useState(0.8);
  const [drafted, setDrafted] = useState(4);
  const [draftCost, setDraftCost] = useState(0.2);
  const [checkCost, setCheckCost] = useState(0.02);
  const best = bestDrafts(share, draftCost, checkCost, MOST);
  const rows = acceptance.rows.map((row) => [
    `${row.scorer}, ρ ${row.kv_retention}`,
    row.drafted,
    percent(row.share),
    count(row.texts),
  ]);
  return html`<div>
    <${Slider}
      label="Acceptance a"
      value=${share}
      onChange=${setShare}
      min="0"
      max="0.99"
      step="0.01"
      format=${fixed(2)}
    />
    <${Slider} label="Drafts γ" value=${drafted} onChange=${setDrafted} min="0" max=${MOST} />
    <${Slider}
      label="Time of a draft, in steps"
      value=${draftCost}
      onChange=${setDraftCost}
      min="0"
      max="1"
      step="0.01"
      format=${fixed(2)}
    />
    <${Slider}
      label="Time to check one, in steps"
      value=${checkCost}
      onChange=${setCheckCost}
      min="0"
      max="0.5"
      step="0.01"
      format=${fixed(2)}
    />
    <${Figures}
      rows=${[
        ["Tokens of an iteration", expectedTokens(share, drafted).toFixed(2)],
        ["Speed-up", `${speedUp(share, drafted, draftCost, checkCost).toFixed(2)} ×`],
        [
          "Best number of drafts",
          `${best}: ${speedUp(share, best, draftCost, checkCost).toFixed(2)} ×`,
        ],
      ]}
    />
    <${Curve} share=${share} drafted=${drafted} draftCost=${draftCost} checkCost=${checkCost} />
    <${Table}
      caption="Drafts from a compressed cache (compressed_kv): accepted, measured"
      head=${["drafts read", "γ", "accepted, median", "texts"]}
      rows=${rows}
    />
    <${Origin} of=${acceptance} />
  </div>`;
}

export const Widget = withData(["acceptance"], Speculation);
