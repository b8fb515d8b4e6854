/** Where a conversation's next question is written. */
import { html, useRef, useState } from "../preact.js";
import { QuestionForm, SubmitOrStop } from "./question_form.js";

const MOST_HEIGHT_PX = 240;

export function Composer({ app, running }) {
  const [documents, change] = useState([]);
  const text = useRef();
  const send = (event) => {
    event.preventDefault();
    const content = text.current.value.trim();
    if (running || (content === "" && documents.length === 0)) return;
    text.current.value = "";
    fit(text.current);
    change([]);
    app.send(content, documents);
  };
  const area = { ref: text, rows: 1, onInput: ({ target }) => fit(target) };
  return html`<${QuestionForm} name="composer" ...${{ app, documents, change, area }} onSubmit=${send}>
    <${SubmitOrStop} label="Send" running=${running} onStop=${() => app.stop()} />
  <//>`;
}

/** As high as the text, up to a bound. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, MOST_HEIGHT_PX)}px`;
}
