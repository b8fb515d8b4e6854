/** Where a question is written. */
import { html, useRef, useState } from "../preact.js";
import { DocumentChips, LONG_PASTE, documentOfFile, documentOfPaste } from "./documents.js";

const MOST_HEIGHT_PX = 240;

export function Composer({ app, running }) {
  const [documents, setDocuments] = useState([]);
  const [drags, drag] = useState(false);
  const text = useRef();
  const file = useRef();
  const add = (document) => setDocuments((known) => [...known, document]);
  const addFiles = async (files) => {
    for (const each of files) await documentOfFile(each).then(add, (error) => app.say(error.message));
  };
  const send = (event) => {
    event?.preventDefault();
    const content = text.current.value.trim();
    if (running || (content === "" && documents.length === 0)) return;
    text.current.value = "";
    fit(text.current);
    setDocuments([]);
    app.send(content, documents);
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
    class="composer"
    data-drags=${drags}
    onSubmit=${send}
    onDragOver=${over}
    onDragLeave=${() => drag(false)}
    onDrop=${drop}
  >
    ${documents.length > 0 &&
    html`<${DocumentChips}
      documents=${documents}
      onRemove=${(at) => setDocuments(documents.filter((_, other) => other !== at))}
    />`}
    <textarea
      id="question"
      ref=${text}
      rows="1"
      aria-label="Question"
      placeholder="Ask something"
      onInput=${({ target }) => fit(target)}
      onKeyDown=${(event) => sendOnEnter(event, send)}
      onPaste=${(event) => takePaste(event, (pasted) => add(documentOfPaste(pasted, documents.length + 1)))}
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
      ${running
        ? html`<button type="button" class="main" onClick=${() => app.stop()}>Stop</button>`
        : html`<button class="main">Send</button>`}
    </div>
  </form>`;
}

/** As high as the text, up to a bound. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, MOST_HEIGHT_PX)}px`;
}

/** Enter sends, with Ctrl too; with Shift, or inside an input method, it stays a character. */
function sendOnEnter(event, send) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
}

function takePaste(event, add) {
  const pasted = event.clipboardData.getData("text/plain");
  if (pasted.length < LONG_PASTE) return;
  event.preventDefault();
  add(pasted);
}
