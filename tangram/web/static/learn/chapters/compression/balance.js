/** Heads of one layer on the workers of a card: equal parts, and parts by budgets. */
import { balanceHeads, runTasks } from "../../math.js";
import { Choice, count, Figures, html, percent, Slider, useState } from "../../view.js";
import { pagesOfHeads } from "./budgets.js";

const WIDTH = 600;
const LEAST = 128; // entries of a part

function Workers({ found, workers, longest, label }) {
  const x = (at) => (WIDTH * at) / longest;
  return html`<figure>
    <figcaption>${label}</figcaption>
    <svg viewBox="0 0 ${WIDTH} ${workers * 10}" class="bars" role="img" aria-label=${label}>
      ${found.tasks.map(
        (task) =>
          html`<rect
            class=${task.head % 2 ? "shared" : "own"}
            x=${x(task.begin)}
            y=${task.worker * 10}
            width=${Math.max(0.5, x(task.end) - x(task.begin) - 1)}
            height="8"
          >
            <title>head ${task.head}</title>
          </rect>`,
      )}
    </svg>
  </figure>`;
}

export function Balance({ profile, retention }) {
  const [layer, setLayer] = useState(7);
  const [workers, setWorkers] = useState(24);
  const [tasks, setTasks] = useState(1);
  const [chunks, setChunks] = useState(16);
  const pages = pagesOfHeads(profile, retention)[Math.min(layer, profile.layers.length - 1)];
  const entries = pages.map((kept) => kept * profile.page_tokens * chunks);
  const parts = balanceHeads(entries, workers, tasks, LEAST);
  const equal = entries.map(() => Math.max(1, Math.ceil((tasks * workers) / entries.length)));
  const [balanced, even] = [parts, equal].map((some) => runTasks(entries, some, workers));
  const longest = Math.max(balanced.longest, even.longest);
  const total = entries.reduce((sum, one) => sum + one, 0);
  const used = (found) => percent(total / (workers * found.longest));
  return html`<section aria-label="Ahead-of-time balancing">
    <h3>Balancing ahead of time</h3>
    <${Choice} label="Layer" value=${layer} onChange=${setLayer} options=${profile.layers} />
    <${Slider} label="Workers" value=${workers} onChange=${setWorkers} min="1" max="64" />
    <${Slider} label="Tasks a worker" value=${tasks} onChange=${setTasks} min="1" max="8" />
    <${Slider} label="Sealed chunks" value=${chunks} onChange=${setChunks} min="1" max="64" />
    <${Figures}
      rows=${[
        ["Entries by head", entries.map(count).join(" · ")],
        ["Parts by budgets", parts.join(" · ")],
        ["Workers busy, equal parts", used(even)],
        ["Workers busy, by budgets", used(balanced)],
      ]}
    />
    <${Workers}
      found=${even}
      workers=${workers}
      longest=${longest}
      label="${equal[0]} parts a head: ${count(even.longest)} entries until the last worker ends"
    />
    <${Workers}
      found=${balanced}
      workers=${workers}
      longest=${longest}
      label="Parts by budgets: ${count(balanced.longest)} entries until the last worker ends"
    />
  </section>`;
}
