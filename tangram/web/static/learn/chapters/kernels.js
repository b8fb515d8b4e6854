/** Which kernels a card runs, with which tiles. */
import { featuresOf, fitTile, prefillKernels } from "../math.js";
import { bytes, Choice, html, NameChoice, Table, useState, withData } from "../view.js";

const PAST = {
  gathered: "entries are gathered, then read by whole tiles (tensor memory access)",
  paged: "entries are read through the page tables",
};
const FIRST = {
  dense: "torch's own attention: nothing lies in front of the prompt",
  paged: "the same kernel as for later chunks",
};
const yes = (value) => (value ? "yes" : "no");
const spell = (tile) =>
  tile ? `${tile.queries} × ${tile.entries}, ${tile.stages} stages` : "none fits";

function Kernels({ cards: { cards }, kernels }) {
  const [name, setName] = useState("H100 SXM");
  const [dim, setDim] = useState(128);
  const [fp8, setFp8] = useState(false);
  const card = cards.find((one) => one.name === name);
  const features = featuresOf(card);
  const loaded = 2 ** Math.ceil(Math.log2(dim)); // operands are padded to a power of two
  const found = prefillKernels(card, dim);
  const fitted = (tile, hops, widens, least) =>
    fitTile(tile, { head_dim: loaded, element_bytes: 2, hops, widens }, card, least);
  const gathers = found.past === "gathered" && !fp8;
  const paged = dim <= 128 ? kernels.prefill : kernels.prefill_wide;
  const prefill = gathers
    ? fitted(kernels.gathered, 1, false, kernels.gathered.entries)
    : fitted(paged, 1, fp8, 16);
  const cache = fp8
    ? `FP8, converted by ${features.converts_fp8 ? "instructions" : "integer arithmetic"}`
    : "16 bits";
  const rows = [
    ["Compute capability", card.capability.join(".")],
    ["Shared memory of a block", bytes(card.shared_bytes)],
    ["Launches overlap", yes(features.chains)],
    ["Cache", cache],
    ["First chunk of a prompt", fp8 ? FIRST.paged : FIRST[found.first]],
    ["Later chunks", fp8 ? PAST.paged : PAST[found.past]],
    ["Prefill tile", spell(prefill)],
    ...kernels.decode.map((tile) => [
      `Decode, up to ${tile.queries} query rows`,
      spell(fitted(tile, 2, false, 16)),
    ]),
  ];
  return html`<div>
    <${NameChoice} label="Card" value=${name} onChange=${setName} of=${cards} />
    <${Choice}
      label="Dimensions of a head"
      value=${dim}
      onChange=${setDim}
      options=${[64, 80, 128, 256]}
    />
    <${Choice}
      label="Cache"
      value=${fp8}
      onChange=${setFp8}
      options=${[
        [false, "16 bits"],
        [true, "FP8"],
      ]}
    />
    ${
      features.served
        ? html`<${Table} caption="Kernels on ${name}" head=${["what", "choice"]} rows=${rows} />`
        : html`<p role="status">
            The kernels need compute capability 8.0. Here the engine uses the CPU.
          </p>`
    }
  </div>`;
}

export const Widget = withData(["cards", "kernels"], Kernels);
