/** Long texts as documents: they are sent as text, and shown as a chip. */
import { bytes } from "../format.js";
import { html } from "../preact.js";

/** A paste of more characters becomes a document. */
export const LONG_PASTE = 2000;
const MOST_BYTES = 8 * 2 ** 20;

/** @returns {Document} see conversations/tree.js */
export const documentOfPaste = (text, number) => ({ name: `pasted text ${number}`, text });

/**
 * @param {File} file
 * @returns {Promise<Document>}
 * @throws {Error} with a sentence, if the file is no text or too large
 */
export async function documentOfFile(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; a document may have ${bytes(MOST_BYTES)}.`);
  }
  try {
    const decoder = new TextDecoder("utf-8", { fatal: true });
    const text = decoder.decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // Falls through: the bytes are no text.
  }
  throw new Error(`${file.name} is not a text file in UTF-8.`);
}

/** `onRemove(at)` is given while the documents can still be taken away. */
export const DocumentChips = ({ documents, onRemove }) => html`<ul class="chips" aria-label="Documents">
  ${documents.map(
    ({ name, text }, at) => html`<li>
      <details>
        <summary>${name} <span class="soft">${bytes(new Blob([text]).size)}</span></summary>
        <pre tabindex="0">${text}</pre>
      </details>
      ${onRemove &&
      html`<button type="button" aria-label=${`Remove ${name}`} onClick=${() => onRemove(at)}>✕</button>`}
    </li>`,
  )}
</ul>`;
