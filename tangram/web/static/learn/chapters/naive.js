/** Positions that are projected with and without a cache. */
import { countCachedPositions, countNaivePositions } from "../math.js";
import {
  count,
  Figures,
  html,
  Origin,
  roundSteps,
  seconds,
  Slider,
  useState,
  withData,
} from "../view.js";

const TOKENS = [...new Set([...roundSteps(1, 4000), 4096])];

const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

/** One square for each projected position: a row is a step. */
const MOST_STEPS = 24;

function Steps({ tokens }) {
  const shown = Math.min(tokens, MOST_STEPS);
  const cells = [];
  for (let step = 0; step < shown; step += 1) {
    for (let place = 0; place <= step; place += 1) {
      const kind = place === step ? "fresh" : "again";
      cells.push(html`<rect class=${kind} x=${place * 10} y=${step * 10} width="8" height="8" />`);
    }
  }
  const side = shown * 10;
  return html`<svg
    viewBox="0 0 ${Math.max(side, 120)} ${side}"
    class="steps"
    role="img"
    aria-label="${shown} steps: each projects all positions so far, with a cache only the newest"
  >
    ${cells}
  </svg>`;
}

const run = ({ positions, seconds: all }) =>
  `${count(positions)} positions and ${seconds(middle(all))}`;
const compare = ({ model, tokens, naive, cached }) =>
  `${model}, ${tokens} tokens: ${run(naive)} without a cache, ${run(cached)} with it.`;

function Naive({ naive: measured }) {
  const [tokens, setTokens] = useState(100);
  const [prompt, setPrompt] = useState(1);
  const [without, within] = [countNaivePositions, countCachedPositions].map((f) =>
    f(prompt, tokens),
  );
  return html`<div>
    <${Slider}
      label="Tokens"
      value=${tokens}
      onChange=${setTokens}
      values=${TOKENS}
      format=${count}
    />
    <${Slider}
      label="Prompt tokens"
      value=${prompt}
      onChange=${setPrompt}
      values=${roundSteps(1, 2000)}
      format=${count}
    />
    <${Figures}
      rows=${[
        ["Positions, no cache", count(without)],
        ["Positions, KV cache", count(within)],
        ["Ratio", (without / within).toFixed(1)],
      ]}
    />
    <${Steps} tokens=${tokens} />
    <p class="legend">
      <span class="key"></span> new position <span class="key again"></span> projected again without
      a cache; the picture has at most ${MOST_STEPS} steps
    </p>
    <p>${compare(measured)}</p>
    <${Origin} of=${measured} />
  </div>`;
}

export const Widget = withData(["naive"], Naive);
