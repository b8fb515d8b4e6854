/** A tree of conversations that the reader edits, and the entries that decoding reads. */
import { choosePacking, countEntries, forestOf } from "../../math.js";
import { count, Figures, html, percent, Slider, useState } from "../../view.js";

const GROUP = 4; // query heads of a KV head
const KEPT = 128;
const START = [
  "4 chunks",
  "  2 chunks",
  "    8 conversations, 60 entries",
  "    1 chunk",
  "      4 conversations, 200 entries",
  "  2 conversations, 500 entries",
  "1 chunk",
  "  3 conversations, 30 entries",
].join("\n");

/** The tree that a text of indented lines describes, or an error that names the line. */
export function parseTree(text) {
  const root = { chunks: 0, tails: [], children: [], depth: -1 };
  const open = [root];
  for (const [number, line] of text.split("\n").entries()) {
    if (!line.trim()) continue;
    const depth = line.length - line.trimStart().length;
    const found = /^(?:(\d{1,3}) chunks?|(\d{1,3}) conversations?, (\d{1,5}) entries)$/.exec(
      line.trim(),
    );
    if (!found)
      return {
        error: `line ${number + 1} is neither “4 chunks” nor “8 conversations, 60 entries”`,
      };
    while (open.at(-1).depth >= depth) open.pop();
    const above = open.at(-1);
    if (found[1]) {
      const node = { chunks: Number(found[1]), tails: [], children: [], depth };
      above.children.push(node);
      open.push(node);
    } else above.tails.push(...Array(Number(found[2])).fill(Number(found[3])));
  }
  return { tree: root };
}

const Nodes = ({ nodes }) =>
  html`<ul>
    ${nodes.map(
      (node) =>
        html`<li>
          ${node.rows} rows share entries ${count(node.begin)}–${count(node.end)}:
          <strong>${node.packed ? " read once" : " read in front of what follows"}</strong>
          ${node.children.length > 0 && html`<${Nodes} nodes=${node.children} />`}
        </li>`,
    )}
  </ul>`;

export function Packing({ kernels: { cost, query_rows: queryRows } }) {
  const mostRows = Math.floor(queryRows / GROUP);
  const [text, setText] = useState(START);
  const [kept, setKept] = useState(KEPT);
  const { tree, error } = parseTree(text);
  const forest = forestOf(tree ?? { chunks: 0 }, kept);
  const [chosen, alone] = ["measured", "off"].map((rule) =>
    choosePacking(forest, cost, GROUP, mostRows, rule),
  );
  const [packed, separate] = [chosen, alone].map((one) => countEntries(one, mostRows));
  return html`<section aria-label="Shared prefixes in one plan">
    <h3>Shared prefixes in one plan</h3>
    <div class="control">
      <label for="tree">Conversations of a batch, as a tree</label>
      <textarea
        id="tree"
        rows="9"
        spellcheck="false"
        aria-invalid=${Boolean(error)}
        onInput=${(event) => setText(event.currentTarget.value)}
      >
${START}</textarea>
    </div>
    ${error && html`<p role="alert">${error}</p>`}
    <${Slider}
      label="Entries a head keeps of a chunk"
      value=${kept}
      onChange=${setKept}
      min="16"
      max="512"
      step="16"
      format=${count}
    />
    <${Figures}
      rows=${[
        ["Entries read, each row alone", count(separate)],
        ["Entries read, packed where it pays", count(packed)],
        ["Spared", separate ? percent(1 - packed / separate) : "–"],
      ]}
    />
    <${Nodes} nodes=${chosen.roots} />
  </section>`;
}
