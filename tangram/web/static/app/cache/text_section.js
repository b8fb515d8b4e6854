/** The painted text and the heads grid, which answer each other. */
import { bytes, count, percent, percentHeld } from "../format.js";
import { html, useEffect, useRef, useState } from "../preact.js";
import { HeadsGrid } from "./heads_grid.js";
import { shareGround } from "./palette.js";
import { spellKind } from "./request_cache.js";
import { Reuse } from "./reuse.js";
import { TextMap } from "./text_map.js";
import { spell } from "./text_layout.js";

const NOTHING = "Nothing yet: an answer's cache is shown while it is written.";
const FORGOTTEN = "The server has forgotten this answer's cache. The next answer shows its own.";
const UNDRAFTED =
  "This answer has no drafts, because its cache drops entries. Shown is what the cache holds.";

export function TextSection({ app, model }) {
  const { watch } = app;
  const [token, setToken] = useState(null);
  const [row, setRow] = useState(null);
  const [reuse, setReuse] = useState(null);
  const parts = useRef({});
  const pictures = useRef(null);
  const show = useRef(null);
  // What is painted: the entries that are held, or those of them that drafts read.
  const [wanted, showDrafts] = useState(false);
  const [drafted, setDrafted] = useState(true);
  const drafts = wanted && drafted;
  show.current = () => showCache(pictures.current, parts.current, watch, model, drafts);
  useEffect(() => {
    pictures.current = makePictures(parts.current, model, setToken, setRow);
    const end = watch.on("request", () => {
      show.current();
      setReuse(watch.cache?.reuse ?? null);
      setDrafted(mayDraft(model, watch.cache?.view ?? null));
    });
    return () => {
      end();
      pictures.current.text.close();
      pictures.current.heads.close();
    };
  }, [model]);
  useEffect(() => show.current(), [model, drafts]);
  useEffect(() => pictures.current?.text.showHead(row), [row]);
  useEffect(() => {
    const known = token !== null && watch.cache !== null;
    pictures.current?.heads.showKeepers(known ? keepersOf(watch.cache, token) : null);
  }, [token, drafts]);
  // An element that is gone stays known: events may still come until the effect above ends.
  const part = (name) => (element) => element && (parts.current[name] = element);
  return html`<section aria-label="Text in the cache">
    <h2>Text in the cache</h2>
    <p class="caption" ref=${part("caption")}></p>
    <${Reuse} reuse=${reuse} />
    ${model.speculation?.method === "compressed_kv" && html`<${Shown} onChange=${showDrafts} />`}
    ${wanted && !drafted && html`<p class="caption" role="status">${UNDRAFTED}</p>`}
    <div class="text-map" ref=${part("frame")}>
      <canvas
        ref=${part("text")}
        tabindex="0"
        role="application"
        aria-label="Tokens, painted by the share of heads that hold them; arrow keys choose one"
      ></canvas>
      <div ref=${part("spacer")}></div>
    </div>
    <${Legend} />
    <p class="detail" role="status">${describe(watch.cache, model, token, row, drafts)}</p>
    <h2>Layers × heads</h2>
    <p class="caption">
      A column is a layer, a row a KV head. Above: what the profile lets each keep of a chunk. Below:
      ${" "}${spellLower(token, drafts)}
    </p>
    <div class="heads" ref=${part("headsFrame")}>
      <canvas
        ref=${part("heads")}
        tabindex="0"
        role="application"
        aria-label="KV heads by layer; arrow keys choose one and show its tokens"
      ></canvas>
    </div>
    <p class="detail" ref=${part("heldNow")}></p>
  </section>`;
}

function makePictures(parts, model, onToken, onHead) {
  return {
    text: new TextMap(parts.text, parts.frame, parts.spacer, onToken),
    heads: new HeadsGrid(parts.heads, parts.headsFrame, model, onHead),
  };
}

/** Show what is known now; called with every answer of the server, so it renders no component. */
function showCache({ text, heads }, parts, { cache, forgotten }, model, drafts) {
  cache?.showDrafts(drafts);
  text.show(cache);
  const budget = budgetShares(model, cache?.view ?? null);
  if (cache === null || cache.view === null) {
    parts.caption.textContent = forgotten ? FORGOTTEN : NOTHING;
    parts.heldNow.textContent = "";
    heads.show(budget, null);
    return;
  }
  const held = cache.heldByRow();
  const entries = cache.cachedTokens;
  heads.show(budget, Float32Array.from(held, (tokens) => (entries ? tokens / entries : 0)));
  parts.caption.textContent = caption(cache);
  const whole = held.reduce((sum, tokens) => sum + tokens, 0);
  const share = entries ? whole / (entries * held.length) : null;
  parts.heldNow.textContent = model.recorded
    ? `${count(whole)} entries ${drafts ? "read by drafts" : "held"} of ${count(entries * held.length)}: ${percent(share)}. ${spellMemory(cache.view)}`
    : `The server does not record which tokens heads keep. ${spellMemory(cache.view)}`;
}

const spellMemory = (view) =>
  `${bytes(view.kv_bytes)} held${view.state === "ended" ? " at the end" : ""}, ${bytes(view.kv_bytes_uncompressed)} without compression: ${percentHeld(view)}.`;

function spellLower(token, drafts) {
  if (token === null) return drafts ? "what drafts read of each." : "what each holds now.";
  return drafts ? "those whose entry of this token drafts read." : "those that hold this token.";
}

/** Which entries the text and the lower grid tell of. */
const Shown = ({ onChange }) => html`<label class="inline">
  Shown
  <select onChange=${({ target }) => onChange(target.value === "drafts")}>
    <option value="held">what the cache holds</option>
    <option value="drafts">what drafts read</option>
  </select>
</label>`;

function caption({ tokens, view, rawTokens: raw }) {
  return `${count(tokens)} tokens, ${view.state}: ${count(view.chunks.length)} sealed chunks, ${count(raw)} tokens not compressed yet`;
}

/** The server's entry for a request's retention, or of its default. @returns {Retention|undefined} */
const findRetention = ({ retentions }, view) =>
  retentions.find((each) =>
    view === null
      ? each.default
      : each.kv_retention === view.kv_retention && each.scorer === view.scorer,
  );

/** Whether the request may have drafts; where nothing is known of it, as if it had. */
const mayDraft = (model, view) => view === null || (findRetention(model, view)?.drafted ?? true);

/** What a request's profile lets each head keep of a chunk, as shares; null if unknown. */
function budgetShares(model, view) {
  const budgets = findRetention(model, view)?.budgets;
  return budgets ? Float32Array.from(budgets.flat(), (kept) => kept / model.chunk_tokens) : null;
}

const keepersOf = (cache, token) =>
  Array.from({ length: cache.model.layers * cache.model.kv_heads }, (_, row) =>
    cache.keeps(row, token),
  );

/** The token or the head that is chosen, in words. */
function describe(cache, model, token, row, drafts) {
  if (cache === null) return "";
  if (token !== null) {
    const kept = cache.share(token);
    const heads =
      kept === null
        ? spellKind(cache.kinds[token])
        : `${drafts ? "read by the drafts of" : "held by"} ${Math.round(kept * cache.rows.length)} of ${cache.rows.length} heads (${spellKind(cache.kinds[token])})`;
    const place = cache.place(token) === "host" ? ", in host memory" : "";
    return `Token ${token} “${spell(cache.texts[token])}”: ${heads}${place}`;
  }
  if (row === null) return "Point at a token or a head, or choose one with the arrow keys.";
  const [layer, head] = [Math.floor(row / model.kv_heads), row % model.kv_heads];
  return `Layer ${layer}, head ${head}: ${drafts ? "drafts read" : "holds"} ${count(cache.heldByRow()[row])} of ${count(cache.cachedTokens)} tokens`;
}

const Legend = () => html`<div class="legend">
  <span>0 %</span>
  <span class="scale" aria-hidden="true">
    ${Array.from({ length: 24 }, (_, at) => {
      const paint = (element) => element && (element.style.background = shareGround(at / 23));
      return html`<i ref=${paint}></i>`;
    })}
  </span>
  <span>100 % of the heads hold the token. Underlined: not compressed yet.</span>
</div>`;

