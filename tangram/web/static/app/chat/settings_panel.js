/** What this conversation sends along: retention, sampling, a system prompt. */
import { html } from "../preact.js";
import { fieldsOf, nameRetention } from "../retentions.js";
import { useStore } from "../store.js";
import { NUMBERS, describeDefault } from "./settings.js";

export function SettingsPanel({ app, conversation }) {
  const { id, settings } = conversation;
  const sampling = useStore(app.store, (state) => state.sampling);
  const set = (name, value) => app.setSettings(id, { [name]: value });
  return html`<details class="settings">
    <summary>Settings of this conversation</summary>
    <div class="fields">
      <${Retention} app=${app} settings=${settings} onSet=${(changes) => app.setSettings(id, changes)} />
      ${NUMBERS.map(
        ([name, label, least, most, step]) => html`<label key=${name}>
          ${label}
          <input
            type="number"
            name=${name}
            min=${least}
            max=${most}
            step=${step}
            placeholder=${describeDefault(name, sampling)}
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

const NO_RETENTION = { kv_retention: null, kv_scorer: null };
const spellFields = ({ kv_retention: ratio, kv_scorer: scorer }) =>
  [ratio, scorer].filter((each) => each != null).join(" ");

function Retention({ app, settings, onSet }) {
  const model = useStore(app.watch.status, (status) => status.model);
  const retentions = model?.retentions ?? [];
  const choices = retentions.map((each) => ({ each, fields: fieldsOf(each, retentions) }));
  const choose = ({ target }) => {
    const chosen = choices.find(({ fields }) => spellFields(fields) === target.value);
    onSet({ ...NO_RETENTION, ...chosen?.fields });
  };
  return html`<label>
    KV retention
    <select name="kv_retention" value=${spellFields(settings)} onChange=${choose}>
      <option value="">as the server has it</option>
      ${choices.map(
        ({ each, fields }) =>
          html`<option value=${spellFields(fields)}>
            ${nameRetention(each)}${each.default ? ", the server's" : ""}
          </option>`,
      )}
    </select>
  </label>`;
}
