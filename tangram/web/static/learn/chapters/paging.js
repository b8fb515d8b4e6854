/** Conversations that begin with the same tokens, and the pages they hold together. */
import { kvSize, layoutOf, sharePages } from "../math.js";
import {
  bytes,
  count,
  Figures,
  html,
  NameChoice,
  percent,
  RetentionSlider,
  Slider,
  useState,
  withData,
} from "../view.js";

const PAGES = { page_tokens: 16, heads_per_page: 4, chunk_tokens: 512, dtype: "bf16" };
const SHOWN = 8;

/** A bar for each conversation: chunks and pages that are shared, then its own. */
function Bars({ conversations, cached, tokens }) {
  const shown = Math.min(conversations, SHOWN);
  const width = 600;
  const at = (value) => (width * value) / Math.max(1, tokens);
  const bars = Array.from(
    { length: shown },
    (_, n) =>
      html`<g>
        <rect class=${n ? "reused" : "shared"} x="0" y=${n * 18} width=${at(cached)} height="14" />
        <rect class="own" x=${at(cached)} y=${n * 18} width=${at(tokens - cached)} height="14" />
      </g>`,
  );
  const label = `${percent(cached / tokens)} of each conversation lies in shared pages`;
  return html`<svg viewBox="0 0 ${width} ${shown * 18}" class="bars" role="img" aria-label=${label}>
    ${bars}
  </svg>`;
}

function Paging({ models: { models } }) {
  const [name, setName] = useState("qwen3-4b");
  const [retention, setRetention] = useState(0.25);
  const [conversations, setConversations] = useState(8);
  const [shared, setShared] = useState(4000);
  const [own, setOwn] = useState(300);
  const usable = models.filter(
    (one) => !one.latent && one.windows.every((window) => window === null),
  );
  const model = usable.find((one) => one.name === name);
  const options = { ...PAGES, retention, context_tokens: shared + own };
  const found = sharePages(layoutOf(model, options), conversations, shared, own);
  const page = kvSize(model, options).page_bytes;
  return html`<div>
    <${NameChoice} label="Model" value=${name} onChange=${setName} of=${usable} />
    <${RetentionSlider} value=${retention} onChange=${setRetention} />
    <${Slider}
      label="Conversations"
      value=${conversations}
      onChange=${setConversations}
      min="1"
      max="64"
    />
    <${Slider}
      label="Tokens at the start of all"
      value=${shared}
      onChange=${setShared}
      min="0"
      max="16000"
      step="50"
      format=${count}
    />
    <${Slider}
      label="Tokens of their own"
      value=${own}
      onChange=${setOwn}
      min="1"
      max="4000"
      format=${count}
    />
    <${Figures}
      rows=${[
        [
          "Pages, each for itself",
          `${count(found.separate_pages)} = ${bytes(found.separate_pages * page)}`,
        ],
        ["Pages held", `${count(found.pages)} = ${bytes(found.pages * page)}`],
        ["Of them shared", count(found.shared_pages)],
        ["Prompt tokens found, from the second on", count(found.cached_tokens)],
        ["Computed again at the seam", count(shared - found.cached_tokens)],
      ]}
    />
    <${Bars} conversations=${conversations} cached=${found.cached_tokens} tokens=${shared + own} />
    <p class="legend">
      <span class="key shared"></span> computed once <span class="key reused"></span> the same
      pages, reused <span class="key own"></span> own pages
    </p>
  </div>`;
}

export const Widget = withData(["models"], Paging);
