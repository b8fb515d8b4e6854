/** Where a question and its documents are given. */
import { html, useRef, useState } from "../preact.js";
import { DocumentChips, LONG_PASTE, documentOfFile, documentOfPaste } from "./documents.js";

/**
 * A long paste and text files, chosen or dropped, become documents. Enter submits.
 * @param {object} props
 * @param {string} [props.name] the form's class
 * @param {(update: (known: Document[]) => Document[]) => void} props.change what `documents` are
 * @param {object} props.area what the text area has besides
 * @param props.children what stands beside the button for files
 */
export function QuestionForm({ app, name, documents, change, area, onSubmit, children }) {
  const [drags, drag] = useState(false);
  const form = useRef();
  const file = useRef();
  const add = (document) => change((known) => [...known, document]);
  const addFiles = async (files) => {
    for (const each of files) await documentOfFile(each).then(add, (error) => app.say(error.message));
  };
  const drop = (event) => {
    event.preventDefault();
    drag(false);
    addFiles(event.dataTransfer.files);
  };
  const over = (event) => {
    event.preventDefault();
    drag(true);
  };
  return html`<form
    ref=${form}
    class=${name}
    data-drags=${drags}
    onSubmit=${onSubmit}
    onDragOver=${over}
    onDragLeave=${() => drag(false)}
    onDrop=${drop}
  >
    ${documents.length > 0 &&
    html`<${DocumentChips}
      documents=${documents}
      onRemove=${(at) => change((known) => known.filter((_, other) => other !== at))}
    />`}
    <textarea
      id="question"
      aria-label="Question"
      placeholder="Ask something"
      onKeyDown=${(event) => submitOnEnter(event, form.current)}
      onPaste=${(event) => takePaste(event, (pasted) => add(documentOfPaste(pasted, documents.length + 1)))}
      ...${area}
    ></textarea>
    <div class="row">
      <button type="button" onClick=${() => file.current.click()}>Add a text file</button>
      <input
        ref=${file}
        type="file"
        multiple
        hidden
        aria-label="Text files"
        onChange=${({ target }) => addFiles([...target.files]).then(() => (target.value = ""))}
      />
      ${children}
    </div>
  </form>`;
}

/** Submits the form, or stops what was asked; always one element, which keeps the focus. */
export function SubmitOrStop({ label, running, onStop }) {
  const stop = (event) => {
    // What stops may render at once; the click would then submit.
    event.preventDefault();
    onStop();
  };
  return html`<button
    class="main"
    type=${running ? "button" : "submit"}
    onClick=${running ? stop : undefined}
  >
    ${running ? "Stop" : label}
  </button>`;
}

/** Enter submits, with Ctrl too; with Shift, or inside an input method, it stays a character. */
function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

function takePaste(event, add) {
  const pasted = event.clipboardData.getData("text/plain");
  if (pasted.length < LONG_PASTE) return;
  event.preventDefault();
  add(pasted);
}
