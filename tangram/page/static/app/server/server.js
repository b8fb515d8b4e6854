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

/** Each chart: title, how a value reads, and its lines as [label, field of the history]. */
const CHARTS = [
  ["Throughput, tokens/s", count, [["generated", "throughput"], ["prompt", "prompt_throughput"]]],
  ["Time to first token", seconds, [["median", "ttft_p50"], ["90th percentile", "ttft_p90"]]],
  ["Time per token", seconds, [["median", "tpot_p50"], ["90th percentile", "tpot_p90"]]],
  ["Requests", count, [["running", "running"], ["waiting", "queue"]]],
  [
    "Pages",
    count,
    [["held", "pages_held"], ["kept for reuse", "pages_cached"], ["free", "pages_free"]],
  ],
  ["Prompt tokens found in the cache", percent, [["share", "cached_share"]]],
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
        ([title, spell, lines]) =>
          html`<${Chart} key=${title} title=${title} spell=${spell} lines=${lines} history=${history} />`,
      )}
    </div>`}
  </section>`;
}

function Chart({ title, spell, lines, history }) {
  const frame = useRef();
  const plot = useRef(null);
  const ago = history.at.map((at) => at - history.at.at(-1));
  const data = [ago, ...lines.map(([, field]) => history[field])];
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = makePlot(frame.current, lines, spell, data);
    };
    make();
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: frame.current.clientWidth, height: HEIGHT }),
    );
    observer.observe(frame.current);
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
            html`<div><dt><${Swatch} colour=${COLOURS[at]} /> ${label}, now</dt><dd data-field=${field}>${spell(history[field].at(-1))}</dd></div>`,
        )}
      </dl>
    </figcaption>
    <div ref=${frame} class="plot" role="img" aria-label=${`${title} over time`}></div>
  </figure>`;
}

const HEIGHT = 170;
const AXIS_WIDTH = 64;
const TICKS_S = [60, 120, 300, 600, 1200];

function makePlot(frame, lines, spell, data) {
  const { soft, line } = themeColours();
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const options = {
    width: frame.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, least, most) => [0, Math.max(most, 1e-9) * 1.1] } },
    axes: [
      { ...axis, incrs: TICKS_S, values: (_, ticks) => ticks.map(spellAgo) },
      { ...axis, size: AXIS_WIDTH, values: (_, ticks) => ticks.map(spell) },
    ],
    series: [
      {},
      ...lines.map(([label], at) => ({ label, stroke: COLOURS[at], width: 2, spanGaps: true })),
    ],
  };
  return new uPlot(options, data, frame);
}

/** The server's clock begins at its start, so times are given before now. */
const spellAgo = (at) => (at === 0 ? "now" : `−${Math.round(-at / 60)} min`);
