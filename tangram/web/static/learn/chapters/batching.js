/** Two recorded schedules side by side, and a simulated one for other lengths. */
import { fillShare, simulateSteps } from "../math.js";
import {
  count,
  Figures,
  fixed,
  html,
  Origin,
  percent,
  seconds,
  Slider,
  Table,
  useEffect,
  useLayoutEffect,
  useMemo,
  useState,
  withData,
} from "../view.js";

const KINDS = ["continuous", "static"];
const WIDTH = 600;
const SPEED = 4; // recorded seconds in a second of the replay
const middle = (values) => values[Math.floor(values.length / 2)];
const one = fixed(1);
const total = (steps) => steps.reduce((sum, [taken]) => sum + taken, 0);

/** When each request ran: runs of steps without a gap, in seconds. */
function spansOf(steps) {
  const spans = [];
  const open = new Map();
  let now = 0;
  for (const [taken, rows] of steps) {
    for (const [request, kind] of rows) {
      const last = open.get(request);
      if (last && last.kind === kind && Math.abs(last.end - now) < 1e-9) last.end = now + taken;
      else {
        const span = { request, kind, begin: now, end: now + taken };
        open.set(request, span);
        spans.push(span);
      }
    }
    now += taken;
  }
  return spans;
}

/** Requests in the order in which the engine begins them: the place of each. */
function startOrder({ steps }) {
  const begun = steps.flatMap(([, rows]) => rows.map(([request]) => request));
  return new Map([...new Set(begun)].map((request, place) => [request, place]));
}

const classOf = (kind) => (kind === "decode" || kind === "seal" ? kind : "prompt");

function Replay({ kind, schedule, places, longest, now }) {
  const x = (at) => (WIDTH * at) / longest;
  const spans = useMemo(() => spansOf(schedule.steps), [schedule]);
  const end = total(schedule.steps);
  let running = 0;
  let at = 0;
  for (const [taken, rows] of schedule.steps) {
    if (at <= now) running = rows.length;
    at += taken;
  }
  const bars = spans.map((span) => {
    const last = Math.min(span.end, now);
    return last > span.begin
      ? html`<rect
          class=${classOf(span.kind)}
          x=${x(span.begin)}
          y=${places.get(span.request) * 9}
          width=${Math.max(0.5, x(last) - x(span.begin))}
          height="7"
        />`
      : null;
  });
  const state = now >= end ? `all answered after ${end.toFixed(1)} s` : `${running} sequences run`;
  const label = `${kind}: ${state}`;
  return html`<figure>
    <figcaption>${label}</figcaption>
    <svg
      viewBox="0 0 ${WIDTH} ${places.size * 9}"
      class="replay"
      role="img"
      aria-label=${label}
    >
      ${bars}
      <line
        class="now"
        x1=${x(Math.min(now, end))}
        x2=${x(Math.min(now, end))}
        y1="0"
        y2=${places.size * 9}
      />
    </svg>
  </figure>`;
}

function Simulation() {
  const [text, setText] = useState("90 10 20 60 5 40 15 80 10 30 12 70");
  const [most, setMost] = useState(4);
  const answers = text
    .trim()
    .split(/[\s,]+/)
    .map(Number)
    .slice(0, 64);
  const valid = answers.every((one) => Number.isInteger(one) && one >= 1 && one <= 10000);
  const rows = KINDS.map((kind) => {
    const steps = simulateSteps(valid ? answers : [1], most, kind);
    return [kind, count(steps.length), percent(fillShare(steps, most))];
  });
  return html`<div>
    <div class="control">
      <label for="answers">Your own answers, in tokens</label>
      <input
        id="answers"
        type="text"
        value=${text}
        aria-invalid=${!valid}
        onInput=${(event) => setText(event.currentTarget.value)}
      />
    </div>
    ${
      !valid &&
      html`<p role="alert">Give whole numbers from 1 to 10,000 with spaces between them.</p>`
    }
    <${Slider} label="Places in the batch" value=${most} onChange=${setMost} min="1" max="16" />
    <${Table}
      caption="Steps, where one step computes a prompt"
      head=${["scheduling", "steps", "places used"]}
      rows=${rows}
    />
  </div>`;
}

function Batching({ schedules: recorded }) {
  const { schedules, requests } = recorded;
  const places = useMemo(() => startOrder(schedules.continuous), [schedules]);
  const longest = Math.max(...KINDS.map((kind) => total(schedules[kind].steps)));
  const [now, setNow] = useState(longest);
  const [playing, setPlaying] = useState(false);
  // As soon as the button says that it is paused, no frame moves it further.
  useLayoutEffect(() => {
    if (!playing) return undefined;
    let last = performance.now();
    let frame = requestAnimationFrame(function next(time) {
      const passed = ((time - last) / 1000) * SPEED;
      last = time;
      setNow((at) => Math.min(longest, at + passed));
      frame = requestAnimationFrame(next);
    });
    return () => cancelAnimationFrame(frame);
  }, [playing]);
  useEffect(() => {
    if (now >= longest) setPlaying(false);
  }, [now]);
  const seals = KINDS.some((kind) =>
    schedules[kind].steps.some(([, rows]) => rows.some(([, row]) => row === "seal")),
  );
  const play = () => {
    if (!playing && now >= longest) setNow(0);
    setPlaying(!playing);
  };
  const rows = KINDS.map((kind) => {
    const found = schedules[kind];
    const places = found.steps.map(([, step]) => step);
    return [
      kind,
      `${one(middle(found.seconds))} s (${one(found.seconds[0])}–${one(found.seconds.at(-1))})`,
      count(found.steps.length),
      percent(fillShare(places, recorded.max_num_seqs)),
      seconds(found.ttft_s.p50),
    ];
  });
  return html`<div>
    <p><button onClick=${play}>${playing ? "Pause" : "Replay"}</button></p>
    <${Slider}
      label="Second"
      value=${now}
      onChange=${setNow}
      min="0"
      max=${longest}
      step="0.05"
      format=${fixed(1)}
    />
    ${KINDS.map(
      (kind) =>
        html`<${Replay}
          kind=${kind}
          schedule=${schedules[kind]}
          places=${places}
          longest=${longest}
          now=${now}
        />`,
    )}
    <p class="legend">
      <span class="key prompt"></span> prompt <span class="key decode"></span> decode${
        seals && html` <span class="key seal"></span> sealing a chunk that decode has filled`
      }; a line is a request
    </p>
    <${Table}
      caption="${requests.length} requests, ${recorded.model}, ${recorded.max_num_seqs} places"
      head=${["scheduling", "time, five runs", "steps", "places used", "first token, median"]}
      rows=${rows}
    />
    <${Origin} of=${recorded} />
    <${Simulation} />
  </div>`;
}

export const Widget = withData(["schedules"], Batching);
