/** What the widgets of all chapters share: controls, figures, and data that is recorded. */
import { html, useEffect, useState } from "../app/preact.js";

export {
  html,
  render,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "../app/preact.js";
export { bytes, count, percent, seconds } from "../app/format.js";
export { shareGround, shareInk } from "../app/cache/palette.js";

let controls = 0;
/** An id that no other control of the page has. */
const useId = () => useState(() => `control-${(controls += 1)}`)[0];

/** A slider with its label and value. `values`, if given, are its steps; else min, max, step. */
export function Slider({ label, value, onChange, values, min, max, step = 1, format = String }) {
  const id = useId();
  const at = values ? Math.max(0, values.indexOf(value)) : value;
  const range = values ? { min: 0, max: values.length - 1, step: 1 } : { min, max, step };
  const change = (event) => {
    const found = Number(event.currentTarget.value);
    onChange(values ? values[found] : found);
  };
  return html`<div class="control">
    <label for=${id}>${label}</label>
    <input
      id=${id}
      type="range"
      ...${range}
      value=${at}
      aria-valuetext=${format(value)}
      onInput=${change}
    />
    <output for=${id}>${format(value)}</output>
  </div>`;
}

/** A list to choose from; options are [value, text] or texts. */
export function Choice({ label, value, onChange, options }) {
  const id = useId();
  const pairs = options.map((one) => (Array.isArray(one) ? one : [one, one]));
  const change = (event) => onChange(pairs[event.currentTarget.selectedIndex][0]);
  return html`<div class="control">
    <label for=${id}>${label}</label>
    <select id=${id} onChange=${change}>
      ${pairs.map(([key, text]) => html`<option selected=${key === value}>${text}</option>`)}
    </select>
  </div>`;
}

/** A list of things that have names. */
export const NameChoice = ({ label, value, onChange, of }) =>
  html`<${Choice} ...${{ label, value, onChange }} options=${of.map(({ name }) => name)} />`;

/** The retention ratio of a widget. */
export const RetentionSlider = ({ value, onChange, min = "0.1", max = "1", step = "0.05" }) =>
  html`<${Slider}
    label="Retention ratio ρ"
    ...${{ value, onChange, min, max, step }}
    format=${fixed(2)}
  />`;

/** Figures with their names; a changed value is read aloud. */
export const Figures = ({ rows }) =>
  html`<dl class="figures" aria-live="polite">
    ${rows.map(
      ([name, value]) =>
        html`<div>
          <dt>${name}</dt>
          <dd>${value}</dd>
        </div>`,
    )}
  </dl>`;

/** A table; cells after the first are numbers. Its box scrolls, so the keyboard reaches it. */
export const Table = ({ caption, head, rows }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption>
        ${caption}
      </caption>
      <thead>
        <tr>
          ${head.map((cell) => html`<th scope="col">${cell}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              ${row.map((cell, n) =>
                n ? html`<td>${cell}</td>` : html`<th scope="row">${cell}</th>`,
              )}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;

/** Where a measured figure comes from. */
export const Origin = ({ of }) =>
  html`<p class="origin">
    Measured: <code>${of.command ?? of.source}</code>
    ${of.gpu || of.cpu ? ` · ${of.gpu ?? of.cpu}` : ""}
    ${of.threads && !of.gpu ? `, ${of.threads} thread${of.threads > 1 ? "s" : ""}` : ""}
    ${of.torch ? ` · torch ${of.torch}` : ""} ${of.date ? ` · ${of.date}, commit ${of.commit}` : ""}
  </p>`;

const loaded = new Map();
/** The content of a file of `data/`, which lies beside this module. */
export function loadData(name) {
  if (!loaded.has(name)) {
    const read = async () => {
      const answer = await fetch(new URL(`./data/${name}.json`, import.meta.url));
      if (!answer.ok) throw new Error(`data/${name}.json: status ${answer.status}`);
      return answer.json();
    };
    loaded.set(name, read());
  }
  return loaded.get(name);
}

/** A widget that begins when its data is there. `Widget` gets the contents by name. */
export function withData(names, Widget) {
  return function Loading() {
    const [state, setState] = useState({});
    useEffect(() => {
      Promise.all(names.map(loadData)).then(
        (found) => setState({ data: Object.fromEntries(names.map((n, i) => [n, found[i]])) }),
        (error) => setState({ error }),
      );
    }, []);
    if (state.error) return html`<p role="alert">No data: ${state.error.message}</p>`;
    return state.data ? html`<${Widget} ...${state.data} />` : html`<p>Loading …</p>`;
  };
}

/** Round numbers from `low` to `high`: 1, 2, 5 and their multiples by ten. */
export function roundSteps(low, high) {
  const found = [];
  for (let ten = 1; ten <= high; ten *= 10) {
    for (const digit of [1, 2, 5])
      if (digit * ten >= low && digit * ten <= high) found.push(digit * ten);
  }
  return found;
}

export const powers = (low, high) => {
  const found = [];
  for (let value = low; value <= high; value *= 2) found.push(value);
  return found;
};

export const fixed = (digits) => (value) => value.toFixed(digits);
