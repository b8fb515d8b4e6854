/** The cache beside the conversation: its text, heads, turns, the pool, and the engine's steps. */
import { shownMessages } from "../conversations/tree.js";
import { html } from "../preact.js";
import { useStore } from "../store.js";
import { PoolSection } from "./pool_section.js";
import { StepsSection } from "./steps_section.js";
import { TextSection } from "./text_section.js";
import { TurnsTable } from "./turns.js";

export function CachePanel({ app }) {
  const model = useStore(app.watch.status, (status) => status.model);
  const fault = useStore(app.watch.status, (status) => status.fault);
  const conversation = useStore(app.store, (value) => value.conversations[value.currentId]);
  return html`<aside class="cache" aria-label="The KV cache">
    ${fault !== null && html`<p class="fault" role="status">The cache cannot be shown: ${fault}</p>`}
    ${model !== null &&
    html`<${TextSection} key=${model.model} app=${app} model=${model} />
      <section aria-label="Turns">
        <h2>Turns</h2>
        <${TurnsTable} app=${app} messages=${conversation ? shownMessages(conversation) : []} />
      </section>
      <${PoolSection} app=${app} />
      <${StepsSection} watch=${app.watch} model=${model} />`}
  </aside>`;
}
