/** The size of a cache, and how many fit beside the weights of a card. */
import { ELEMENT_BYTES, fit, kvSize } from "../math.js";
import {
  bytes,
  Choice,
  count,
  Figures,
  html,
  NameChoice,
  powers,
  RetentionSlider,
  Slider,
  Table,
  useState,
  withData,
} from "../view.js";

const GIB = 2 ** 30;
const STEPS_SHARE = 0.9; // --gpu-memory-utilization
const SHAPES = [
  ["published", "as published"],
  ["mha", "MHA: a KV head for each query head"],
  ["mqa", "MQA: one KV head"],
];
const WEIGHTS = [
  [2, "16 bits"],
  [1, "8 bits"],
  [0.5, "4 bits"],
];
const PAGES = { page_tokens: 16, heads_per_page: 4, chunk_tokens: 512 };
const gib = (value) => `${(value / GIB).toFixed(2)} GiB`;

const shapeOf = (model, kind) =>
  kind === "published" || model.latent
    ? model
    : { ...model, kv_heads: kind === "mha" ? model.query_heads : 1 };

function Listed({ models, listed }) {
  const options = { ...PAGES, context_tokens: 32000, dtype: "bf16", retention: 1 };
  const rows = listed.map((name) => {
    const model = models.find((one) => one.name === name);
    const size = kvSize(model, options);
    return [
      name,
      model.latent ? "MLA" : "GQA",
      count(size.bytes_per_token),
      gib(size.uncompressed_bytes),
    ];
  });
  return html`<${Table}
    caption="Eight models, 32,000 tokens in 16 bits"
    head=${["model", "attention", "bytes a token", "size"]}
    rows=${rows}
  />`;
}

function Cost({ models: { models, listed }, cards: { cards } }) {
  const [name, setName] = useState("llama-3.1-8b");
  const [kind, setKind] = useState("published");
  const [dtype, setDtype] = useState("bf16");
  const [tokens, setTokens] = useState(32768);
  const [retention, setRetention] = useState(1);
  const [weight, setWeight] = useState(2);
  const model = models.find((one) => one.name === name);
  const shape = shapeOf(model, kind);
  const size = kvSize(shape, { ...PAGES, context_tokens: tokens, dtype, retention });
  const rows = cards.map((card) => {
    const found = fit(size, model.parameters * weight, card.memory_gib * STEPS_SHARE);
    const fits = found.cache_gib > 0;
    return [
      card.name,
      `${card.memory_gib} GiB`,
      fits ? `${found.cache_gib.toFixed(1)} GiB` : "weights do not fit",
      fits ? count(found.sequences) : "–",
      fits ? count(found.tokens) : "–",
    ];
  });
  return html`<div>
    <${NameChoice} label="Model" value=${name} onChange=${setName} of=${models} />
    <${Choice} label="Attention" value=${kind} onChange=${setKind} options=${SHAPES} />
    <${Choice}
      label="Cache elements"
      value=${dtype}
      onChange=${setDtype}
      options=${Object.keys(ELEMENT_BYTES)}
    />
    <${Choice} label="Weights" value=${weight} onChange=${setWeight} options=${WEIGHTS} />
    <${Slider}
      label="Tokens"
      value=${tokens}
      onChange=${setTokens}
      values=${powers(512, 2 ** 20)}
      format=${count}
    />
    <${RetentionSlider} value=${retention} onChange=${setRetention} />
    <${Figures}
      rows=${[
        ["A token", `${count(size.bytes_per_token)} bytes`],
        ["Nothing dropped", gib(size.uncompressed_bytes)],
        [`At ρ ${retention.toFixed(2)}, at most`, gib(size.compressed_bytes)],
        ["A page", bytes(size.page_bytes)],
        ["Pages", count(size.pages)],
      ]}
    />
    <${Table}
      caption="Sequences that fit into 0.9 of a card, beside the weights"
      head=${["card", "memory", "for the cache", "sequences", "tokens"]}
      rows=${rows}
    />
    <p class="origin">
      Memory of cards as it is sold. A driver shows up to 6 % less where error correction takes some.
    </p>
    <${Listed} models=${models} listed=${listed} />
  </div>`;
}

export const Widget = withData(["models", "cards"], Cost);
