/** The server over the last hour, from its own numbers. */
import { api } from "../api.js";
import { count, percent, seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../preact.js";
import { Swatch } from "../swatch.js";
import { onTheme, themeColours } from "../theme.js";
import uPlot from "../../vendor/uplot/uPlot.esm.js";

const SPANS = [
  [600, "10 minutes"],
  [3600, "hour"],
];
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];

const spellTime = (value) => (value === 0 ? "0 s" : seconds(value));
// What is counted has no ticks between whole numbers.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].concat(
  Array.from({ length: 9 }, (_, power) => 10 ** (power + 4)),
);

/**
 * Each chart: how a value reads, and its lines as [label, field of the history]. One with `gaps`
 * has no value for the seconds in which no request ended, or began. `top` is the scale's end.
 */
const CHARTS = [
  {
    title: "Throughput, tokens/s",
    spell: count,
    lines: [["generated", "throughput"], ["prompt", "prompt_throughput"]],
  },
  {
    title: "Time to first token",
    spell: spellTime,
    gaps: true,
    lines: [["median", "ttft_p50"], ["90th percentile", "ttft_p90"]],
  },
  {
    title: "Time per token",
    spell: spellTime,
    gaps: true,
    lines: [["median", "tpot_p50"], ["90th percentile", "tpot_p90"]],
  },
  {
    title: "Requests",
    spell: count,
    ticks: WHOLE,
    lines: [["running", "running"], ["waiting", "queue"]],
  },
  {
    title: "Pages",
    spell: count,
    ticks: WHOLE,
    lines: [["held", "pages_held"], ["kept for reuse", "pages_cached"], ["free", "pages_free"]],
  },
  {
    title: "Prompt tokens found in the cache",
    spell: percent,
    top: 1,
    gaps: true,
    lines: [["share", "cached_share"]],
  },
];

/** The history, asked again as often as the server adds to it. */
function useHistory(span) {
  const [state, setState] = useState({ history: null, fault: null });
  useEffect(() => {
    let timer = null;
    let gone = false;
    const read = async () => {
      const next = await api.history(span).then(
        (history) => ({ history, fault: null }),
        ({ message }) => ({ fault: message }),
      );
      if (gone) return;
      setState((known) => ({ ...known, ...next }));
      timer = setTimeout(read, 1000 * (next.history?.step_s ?? 10));
    };
    read();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [span]);
  return state;
}

export function ServerView() {
  const [span, setSpan] = useState(SPANS[1][0]);
  const { history, fault } = useHistory(span);
  return html`<section class="server" aria-label="Server">
    <h2>The server</h2>
    <label class="inline">
      Time
      <select value=${span} onChange=${({ target }) => setSpan(Number(target.value))}>
        ${SPANS.map(([value, name]) => html`<option value=${value}>the last ${name}</option>`)}
      </select>
    </label>
    ${fault && html`<p class="fault" role="alert">${fault}</p>`}
    ${history !== null &&
    html`<div class="charts">
      ${CHARTS.map(
        (chart) => html`<${Chart} key=${chart.title} chart=${chart} history=${history} />`,
      )}
    </div>`}
  </section>`;
}

function Chart({ chart, history }) {
  const { title, spell, lines, gaps } = chart;
  const frame = useRef();
  const plot = useRef(null);
  const ago = history.at.map((at) => at - history.at.at(-1));
  const data = [ago, ...lines.map(([, field]) => history[field])];
  useEffect(() => {
    // When the view goes, the reference is emptied before the observer ends.
    const element = frame.current;
    const make = () => {
      plot.current?.destroy();
      plot.current = makePlot(element, chart, data);
    };
    make();
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: element.clientWidth, height: HEIGHT }),
    );
    observer.observe(element);
    const endTheme = onTheme(make);
    return () => {
      observer.disconnect();
      endTheme();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data), [history]);
  return html`<figure>
    <figcaption>
      ${title}
      <dl class="figures">
        ${lines.map(
          ([label, field], at) =>
            html`<div>
              <dt><${Swatch} colour=${COLOURS[at]} /> ${label}, ${gaps ? "last" : "now"}</dt>
              <dd data-field=${field}>${spell(newest(history[field]))}</dd>
            </div>`,
        )}
      </dl>
    </figcaption>
    <div ref=${frame} class="plot" role="img" aria-label=${`${title} over time`}></div>
  </figure>`;
}

/** The last value of a list that is not null, if there is one. */
const newest = (values) => values.findLast((value) => value !== null);

const HEIGHT = 170;
const AXIS_WIDTH = 64;
const TICKS_S = [60, 120, 300, 600, 1200];

function makePlot(frame, { lines, spell, ticks, top, gaps }, data) {
  const { soft, line } = themeColours();
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const options = {
    width: frame.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, least, most) => [0, top ?? Math.max(most, 1e-9) * 1.1] } },
    axes: [
      { ...axis, incrs: TICKS_S, values: (_, ticks) => ticks.map(spellAgo) },
      { ...axis, size: AXIS_WIDTH, values: (_, at) => at.map(spell), ...(ticks && { incrs: ticks }) },
    ],
    series: [
      {},
      ...lines.map(([label], at) => ({
        label,
        stroke: COLOURS[at],
        width: 2,
        points: { show: gaps === true, size: 6, fill: COLOURS[at] },
      })),
    ],
  };
  return new uPlot(options, data, frame);
}

/** The server's clock begins at its start, so times are given before now. */
const spellAgo = (at) => (at === 0 ? "now" : `−${Math.round(-at / 60)} min`);
