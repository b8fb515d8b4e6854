/** Online softmax, a tile at a time, with numbers that the reader may change. */
import { onlineSoftmax, softmaxPart } from "../math.js";
import { Choice, Figures, fixed, html, Table, useState } from "../view.js";

const VALUES = [1, 4, 2, 8, 5, 7, 3, 6];
const number = fixed(4);

export function Widget() {
  const [text, setText] = useState("1.2 0.3 2.5 -1 3.1 0 1.7 2.9");
  const [tile, setTile] = useState(2);
  const [shown, setShown] = useState(1);
  const scores = text
    .trim()
    .split(/[\s,]+/)
    .map(Number)
    .slice(0, VALUES.length);
  const valid = text.trim() !== "" && scores.every(Number.isFinite);
  const read = valid ? scores : [0];
  const values = VALUES.slice(0, read.length);
  const { steps, result } = onlineSoftmax(read, values, tile);
  const whole = softmaxPart(
    [1],
    read.map((score) => [score]),
    values.map((value) => [value]),
    1,
  );
  const rows = steps
    .slice(0, shown)
    .map((step) => [
      `${step.begin}–${step.end - 1}`,
      read.slice(step.begin, step.end).join("  "),
      number(step.peak),
      number(step.factor),
      number(step.sum),
      number(step.accumulator),
    ]);
  const done = shown >= steps.length;
  const change = (set) => (value) => {
    set(value);
    setShown(1);
  };
  return html`<div>
    <div class="control">
      <label for="scores">Scores, up to eight</label>
      <input
        id="scores"
        type="text"
        value=${text}
        aria-invalid=${!valid}
        onInput=${(event) => change(setText)(event.currentTarget.value)}
      />
    </div>
    ${!valid && html`<p role="alert">Give numbers with spaces between them.</p>`}
    <p>Their values are ${values.join(", ")}.</p>
    <${Choice}
      label="Scores in a tile"
      value=${tile}
      onChange=${change(setTile)}
      options=${[1, 2, 4, 8]}
    />
    <p>
      <button onClick=${() => setShown(shown + 1)} disabled=${done}>Next tile</button>
      <button onClick=${() => setShown(1)} disabled=${shown === 1}>Start again</button>
    </p>
    <${Table}
      caption="State after each tile"
      head=${["entries", "scores", "maximum m", "rescale by", "sum l", "accumulator"]}
      rows=${rows}
    />
    <${Figures}
      rows=${[
        ["Accumulator / sum", done ? number(result) : "after the last tile"],
        ["Softmax of the whole row", number(whole.out[0])],
      ]}
    />
  </div>`;
}
