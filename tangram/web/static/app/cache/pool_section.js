/** The map of pages, and how many are in each state or of each conversation. */
import { count } from "../format.js";
import { html, useEffect, useRef, useState } from "../preact.js";
import { Swatch } from "../swatch.js";
import { conversationColour } from "./palette.js";
import { FREE, STATES } from "./pool.js";
import { PoolMap, STATE_COLOURS } from "./pool_map.js";

const COUNT_EVERY_MS = 200;
const MOST_CONVERSATIONS = 8;

/** The numbers beside the map, at most five times a second. */
function useCounts(app, byConversation) {
  const { watch } = app;
  const read = () => ({
    states: watch.pool.counts(),
    conversations: byConversation ? nameConversations(app) : null,
    hostUsed: watch.pool.hostUsed,
    hostTotal: watch.pool.hostTotal,
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
    setCounts(read());
    const ends = [watch.on("pool", later), watch.on("request", later)];
    return () => {
      clearTimeout(timer);
      for (const end of ends) end();
    };
  }, [watch, byConversation]);
  return counts;
}

/** What a conversation's number is called. */
function nameOf({ store, watch }) {
  const titles = new Map();
  for (const { title, messages } of Object.values(store.value.conversations)) {
    for (const { run } of Object.values(messages)) if (run?.answerId) titles.set(run.answerId, title);
  }
  return (number) => titles.get(watch.pool.answers.get(number)) ?? `conversation ${number}`;
}

/** The conversations that hold pages: number, pages, title, and whether it is shown; that is first. */
function nameConversations(app) {
  const { watch } = app;
  const name = nameOf(app);
  const shown = watch.cache?.view?.conversation;
  const named = watch.pool.countByConversation().map(([number, pages]) => ({
    number,
    pages,
    title: name(number),
    shown: number === shown,
  }));
  return named.sort((one, other) => other.shown - one.shown);
}

export function PoolSection({ app }) {
  const { watch } = app;
  const canvas = useRef();
  const frame = useRef();
  const map = useRef(null);
  const [cell, chooseCell] = useState(null);
  const [byConversation, colourBy] = useState(false);
  const { states, conversations, hostUsed, hostTotal } = useCounts(app, byConversation);
  useEffect(() => {
    map.current = new PoolMap(canvas.current, frame.current, chooseCell);
    const show = () => map.current.show(watch.pool);
    show();
    const end = watch.on("pool", show);
    return () => {
      end();
      map.current.close();
    };
  }, [watch]);
  useEffect(() => map.current.colourBy(byConversation), [byConversation]);
  return html`<section aria-label="Pages">
    <h2>Pages</h2>
    <label class="inline">
      Colours
      <select onChange=${({ target }) => colourBy(target.value === "conversation")}>
        <option value="state">by state</option>
        <option value="conversation">by conversation</option>
      </select>
    </label>
    <div class="pool" ref=${frame}>
      <canvas
        ref=${canvas}
        tabindex="0"
        role="application"
        aria-label="A square for each page of the pool; arrow keys choose one, the lists below count them"
      ></canvas>
    </div>
    <p class="detail" role="status">${describeCell(app, map.current, cell)}</p>
    ${conversations !== null && html`<${Conversations} conversations=${conversations} />`}
    <ul class="counts">
      ${STATES.map(
        (name, state) => html`<li data-state=${state}>
          ${conversations === null && html`<${Swatch} colour=${state === FREE ? null : STATE_COLOURS[state]} />`}
          ${" "}${name} <b>${count(states[state])}</b>
        </li>`,
      )}
      <li data-state="host">in host memory <b>${count(hostUsed)}</b> of ${count(hostTotal)}</li>
    </ul>
  </section>`;
}

/** The chosen page, or the pages that share its square, in words. */
function describeCell(app, map, cell) {
  if (cell === null) return "Point at a page, or choose one with the arrow keys.";
  const { pool } = app.watch;
  const { first, last, shown } = map.pagesOf(cell);
  const pages = first === last ? `Page ${first}` : `Pages ${first} to ${last}, of them ${shown}`;
  const owner = pool.owners[shown];
  const whose = owner === 0 ? "" : `, “${nameOf(app)(owner)}”`;
  return `${pages}: ${STATES[pool.painted()[shown]]}${whose}`;
}

/** The key of the colours of conversations. */
function Conversations({ conversations }) {
  const more = conversations.length - MOST_CONVERSATIONS;
  return html`<p class="caption">
      Light: raw tail. Dark: shared by several, in the colour of one of them. Pale: kept for nobody.
    </p>
    <ul class="counts" aria-label="Conversations in the pool">
      ${conversations.slice(0, MOST_CONVERSATIONS).map(
        ({ number, title, pages, shown }) => html`<li>
          <${Swatch} key=${number} colour=${conversationColour(number)} /> ${" "}
          <span class="title">${title}</span>${shown && " (shown above)"} <b>${count(pages)}</b>
        </li>`,
      )}
      ${more > 0 && html`<li>and ${count(more)} more</li>`}
      ${conversations.length === 0 && html`<li>no conversation has pages</li>`}
    </ul>`;
}
