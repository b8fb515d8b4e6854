/** The map of pages, and how many are in each state. */
import { count } from "../format.js";
import { html, useEffect, useRef, useState } from "../preact.js";
import { Swatch } from "../swatch.js";
import { conversationColour } from "./palette.js";
import { FREE, STATES } from "./pool.js";
import { PoolMap, STATE_COLOURS } from "./pool_map.js";

const COUNT_EVERY_MS = 200;

/** The numbers beside the map, at most five times a second. */
function useCounts(watch) {
  const read = () => ({
    counts: watch.pool.counts(),
    hostUsed: watch.pool.hostUsed,
    hostTotal: watch.pool.hostTotal,
    own: watch.cache?.view?.conversation ?? null,
  });
  const [counts, setCounts] = useState(read);
  useEffect(() => {
    let timer = null;
    const later = () => {
      timer ??= setTimeout(() => {
        timer = null;
        setCounts(read());
      }, COUNT_EVERY_MS);
    };
    later();
    const end = watch.on("pool", later);
    return () => {
      clearTimeout(timer);
      end();
    };
  }, [watch]);
  return counts;
}

export function PoolSection({ watch }) {
  const canvas = useRef();
  const frame = useRef();
  const map = useRef(null);
  const { counts, hostUsed, hostTotal, own } = useCounts(watch);
  useEffect(() => {
    map.current = new PoolMap(canvas.current, frame.current);
    const show = () => map.current.show(watch.pool);
    show();
    const end = watch.on("pool", show);
    return () => {
      end();
      map.current.close();
    };
  }, [watch]);
  const colourBy = ({ target }) => map.current.colourBy(target.value === "conversation");
  return html`<section aria-label="Pages">
    <h2>Pages</h2>
    <label class="inline">
      Colours
      <select onChange=${colourBy}>
        <option value="state">by state</option>
        <option value="conversation">by conversation</option>
      </select>
    </label>
    <div class="pool" ref=${frame}>
      <canvas ref=${canvas} role="img" aria-label="A square for each page of the pool; the list below counts them"></canvas>
    </div>
    <ul class="counts">
      ${STATES.map(
        (name, state) => html`<li data-state=${state}>
          <${Swatch} colour=${state === FREE ? null : STATE_COLOURS[state]} /> ${name}${" "}
          <b>${count(counts[state])}</b>
        </li>`,
      )}
      ${own !== null &&
      html`<li>
        <${Swatch} colour=${conversationColour(own, 48)} /> this conversation, where conversations
        have colours
      </li>`}
      <li data-state="host">in host memory <b>${count(hostUsed)}</b> of ${count(hostTotal)}</li>
    </ul>
  </section>`;
}
