/** What this conversation sends along: retention, sampling, a system prompt. */
import { html } from "../preact.js";
import { useStore } from "../store.js";
import { NUMBERS } from "./settings.js";

/** What a retention is called: 1 drops nothing. */
export const nameRetention = ({ kv_retention: ratio, scorer }) =>
  ratio === 1 ? "1 – nothing dropped" : `${ratio}${scorer ? ` – ${scorer}` : ""}`;

export function SettingsPanel({ app, conversation }) {
  const { id, settings } = conversation;
  const set = (name, value) => app.setSettings(id, { [name]: value });
  return html`<details class="settings">
    <summary>Settings of this conversation</summary>
    <div class="fields">
      <${Retention} app=${app} value=${settings.kv_retention} onSet=${(value) => set("kv_retention", value)} />
      ${NUMBERS.map(
        ([name, label, least, most, step, fallback]) => html`<label key=${name}>
          ${label}
          <input
            type="number"
            name=${name}
            min=${least}
            max=${most}
            step=${step}
            placeholder=${fallback}
            defaultValue=${settings[name] ?? ""}
            onInput=${({ target }) => set(name, numberOf(target))}
          />
          <span class="bounds">This is not sent: it must lie in ${least} to ${most}.</span>
        </label>`,
      )}
      <label class="wide">
        Stop before any of these texts, one a line
        <textarea
          rows="2"
          name="stop"
          defaultValue=${settings.stop ?? ""}
          onInput=${({ target }) => set("stop", target.value)}
        ></textarea>
      </label>
      <label class="wide">
        System prompt
        <textarea
          rows="2"
          name="system"
          defaultValue=${settings.system ?? ""}
          onInput=${({ target }) => set("system", target.value)}
        ></textarea>
      </label>
    </div>
  </details>`;
}

/** The value of a field, or null if it is empty or outside its range. */
function numberOf(field) {
  return field.checkValidity() && field.value !== "" ? field.valueAsNumber : null;
}

export function Retention({ app, value, onSet, label = "KV retention" }) {
  const model = useStore(app.watch.status, (status) => status.model);
  const ratios = model?.retentions ?? [];
  return html`<label>
    ${label}
    <select
      name="kv_retention"
      value=${value ?? ""}
      onChange=${({ target }) => onSet(target.value === "" ? null : Number(target.value))}
    >
      <option value="">as the server has it</option>
      ${ratios.map(
        (each) =>
          html`<option value=${each.kv_retention}>
            ${nameRetention(each)}${each.default ? ", the server's" : ""}
          </option>`,
      )}
    </select>
  </label>`;
}
