/** A cache by hand: each step adds one key and one value, and the output is the same. */
import { softmaxPart } from "../math.js";
import { fixed, Figures, html, Table, useState } from "../view.js";

const WORDS = ["The", "sky", "is", "blue", "because", "light", "scatters"];
const number = fixed(2);

/** Fixed projections of a token (query, key, value): small numbers from its place. */
const project = (place, part) =>
  [0, 1, 2].map((d) => Math.round(100 * Math.sin(1 + part + place * (part + 2) + d * 1.7)) / 100);

const attend = (rows) =>
  softmaxPart(
    project(rows.length - 1, 0),
    rows.map((row) => row.key),
    rows.map((row) => row.value),
    1,
  );

export function Widget() {
  const [length, setLength] = useState(1);
  const projected = (place) => ({ key: project(place, 1), value: project(place, 2) });
  const fresh = Array.from({ length }, (_, place) => projected(place));
  const [cache, setCache] = useState([projected(0)]);
  const next = () => {
    setCache([...cache, projected(cache.length)]);
    setLength(length + 1);
  };
  const restart = () => {
    setCache([projected(0)]);
    setLength(1);
  };
  const [kept, again] = [attend(cache), attend(fresh)];
  const difference = Math.max(...kept.out.map((value, d) => Math.abs(value - again.out[d])));
  const rows = cache.map((row, place) => [
    WORDS[place],
    row.key.map(number).join("  "),
    row.value.map(number).join("  "),
    place === cache.length - 1 ? "projected now" : "read",
  ]);
  return html`<div>
    <p>
      <button onClick=${next} disabled=${length === WORDS.length}>Next token</button>
      <button onClick=${restart} disabled=${length === 1}>Start again</button>
    </p>
    <${Table}
      caption="The cache of one head"
      head=${["token", "key", "value", "this step"]}
      rows=${rows}
    />
    <${Figures}
      rows=${[
        ["Output from the cache", kept.out.map(number).join("  ")],
        ["Output, all projected again", again.out.map(number).join("  ")],
        ["Largest difference", String(difference)],
        ["Projections of this step", `1 instead of ${length}`],
      ]}
    />
  </div>`;
}
