/** The roofline of a card: steps of a model as the batch grows, and measured points. */
import { attainable, crossoverBatch, decodeStep, prefillStep, stepSeconds } from "../math.js";
import {
  Choice,
  count,
  Figures,
  html,
  NameChoice,
  powers,
  seconds,
  Slider,
  useState,
  withData,
} from "../view.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [640, 360, 88, 56];
const X = [0.5, 32768];
const Y = [1e11, 4e15];
const along = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
const x = (intensity) =>
  LEFT + along(Math.min(Math.max(intensity, X[0]), X[1]), X) * (WIDTH - LEFT - 10);
const y = (flops) =>
  (1 - along(Math.min(Math.max(flops, Y[0]), Y[1]), Y)) * (HEIGHT - BOTTOM - 10) + 10;
const tera = (flops) => `${(flops / 1e12).toPrecision(3)} TFLOP/s`;

const Axes = () =>
  html`<g class="axes">
    ${[1, 10, 100, 1000, 10000].map(
      (value) =>
        html`<g>
          <line x1=${x(value)} x2=${x(value)} y1="10" y2=${HEIGHT - BOTTOM} />
          <text x=${x(value)} y=${HEIGHT - BOTTOM + 20} text-anchor="middle">${count(value)}</text>
        </g>`,
    )}
    ${[1e12, 1e13, 1e14, 1e15].map(
      (value) =>
        html`<g>
          <line x1=${LEFT} x2=${WIDTH - 10} y1=${y(value)} y2=${y(value)} />
          <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${count(value / 1e12)}</text>
        </g>`,
    )}
    <text x=${(WIDTH + LEFT) / 2} y=${HEIGHT - 8} text-anchor="middle">FLOP per byte</text>
    <text
      x="20"
      y=${(HEIGHT - BOTTOM) / 2}
      text-anchor="middle"
      transform="rotate(-90 20 ${(HEIGHT - BOTTOM) / 2})"
      >TFLOP/s</text
    >
  </g>`;

function Roof({ card, dashed }) {
  const ridge = card.flops_per_s / card.bytes_per_s;
  const places = [X[0], ridge, X[1]].map((at) => `${x(at)},${y(attainable(card, at))}`);
  return html`<polyline class=${dashed ? "roof dashed" : "roof"} points=${places.join(" ")} />`;
}

const RADIUS = { kernel: 4, whole: 6, step: 7 };
const Point = ({ intensity, flops, kind, title }) =>
  html`<circle class=${kind} cx=${x(intensity)} cy=${y(flops)} r=${RADIUS[kind]}>
    <title>${title}</title>
  </circle>`;

const MEASURED = {
  kernel: { kind: "kernel", text: "decode attention" },
  whole: { kind: "whole", text: "whole steps" },
};
const filesOf = (measured) =>
  [...new Set(measured.flatMap(({ points }) => points).map(({ source }) => source))].join(", ");

function Chart({ card, machine, measured, step, label }) {
  const reached = attainable(card, step.flops / step.bytes);
  return html`<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" class="chart" role="img" aria-label=${label}>
    <${Axes} />
    <${Roof} card=${card} />
    ${machine && html`<${Roof} card=${machine} dashed />`}
    ${measured.flatMap(({ kind, points }) =>
      points.map(
        (one) =>
          html`<${Point}
            kind=${kind}
            intensity=${one.intensity}
            flops=${one.flops_per_s}
            title="${one.case}: ${tera(one.flops_per_s)}"
          />`,
      ),
    )}
    <${Point} kind="step" intensity=${step.flops / step.bytes} flops=${reached} title=${label} />
  </svg>`;
}

function Wall({ roofline: { models, machine, kernels, steps }, cards: { cards } }) {
  const [name, setName] = useState("H100 SXM");
  const [modelName, setModelName] = useState("llama-3.1-8b");
  const [kind, setKind] = useState("decode");
  const [batch, setBatch] = useState(1);
  const [tokens, setTokens] = useState(0);
  const card = cards.find((one) => one.name === name);
  const model = models.find((one) => one.name === modelName);
  const prompt = Math.max(1, tokens);
  const step = kind === "decode" ? decodeStep(model, batch, tokens) : prefillStep(model, prompt);
  const intensity = step.flops / step.bytes;
  const ridge = card.flops_per_s / card.bytes_per_s;
  const least = stepSeconds(card, step);
  const generated = kind === "decode" ? batch : prompt;
  const bound = intensity < ridge ? "memory bandwidth" : "arithmetic";
  const measured = [
    { ...MEASURED.kernel, points: name === machine.card ? kernels : [] },
    { ...MEASURED.whole, points: name === steps.card ? steps.points : [] },
  ].filter(({ points }) => points.length > 0);
  const label = `${kind} on ${name}: ${intensity.toFixed(1)} FLOP per byte, limited by ${bound}`;
  return html`<div>
    <${NameChoice} label="Card" value=${name} onChange=${setName} of=${cards} />
    <${NameChoice}
      label="Model, in 16 bits"
      value=${modelName}
      onChange=${setModelName}
      of=${models}
    />
    <${Choice}
      label="Step"
      value=${kind}
      onChange=${setKind}
      options=${[
        ["decode", "decode: a token each"],
        ["prefill", "prefill: one prompt"],
      ]}
    />
    ${
      kind === "decode" &&
      html`<${Slider}
        label="Batch"
        value=${batch}
        onChange=${setBatch}
        values=${powers(1, 1024)}
        format=${count}
      />`
    }
    <${Slider}
      label=${kind === "decode" ? "Tokens of context each" : "Prompt tokens"}
      value=${tokens}
      onChange=${setTokens}
      values=${[0, ...powers(128, 131072)]}
      format=${count}
    />
    <${Figures}
      rows=${[
        ["FLOP per byte", intensity.toFixed(1)],
        ["The card's ridge", ridge.toFixed(1)],
        ["Limited by", bound],
        ["Least time", seconds(least)],
        ["Tokens/s at most", count(generated / least)],
        ["Crossover batch, without a cache", count(crossoverBatch(card, 2))],
      ]}
    />
    <${Chart}
      card=${card}
      machine=${name === machine.card ? machine : null}
      measured=${measured}
      step=${step}
      label=${label}
    />
    <p class="legend">
      <span class="key step"></span> this step, at most
      ${measured.map(({ kind, text }) => html` <span class="key ${kind}"></span> measured: ${text}`)}
    </p>
    <p class="origin">
      ${name === machine.card && `Dashed: a copy and a matrix product on the ${machine.gpu}. `}
      ${measured.length > 0 && html`Measured points: <code>${filesOf(measured)}</code>.${" "}`}
      ${`Bandwidth and FLOP/s: ${card.source}.`}
    </p>
  </div>`;
}

export const Widget = withData(["roofline", "cards"], Wall);
