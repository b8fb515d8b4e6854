/** The list of conversations: search, rename, delete, export and import. */
import { html, useFocus, useMemo, useRef, useState } from "../preact.js";
import { useStore } from "../store.js";
import { matches } from "./tree.js";

export function ConversationList({ app, onOpen }) {
  const conversations = useStore(app.store, (value) => value.conversations);
  const currentId = useStore(app.store, (value) => value.currentId);
  const [search, setSearch] = useState("");
  const file = useRef();
  const found = useMemo(
    () =>
      Object.values(conversations)
        .filter((each) => matches(each, search))
        .sort((one, other) => other.changedAt - one.changedAt),
    [conversations, search],
  );
  // While an answer grows its conversation changes with every frame; the list shows titles alone.
  const shown = found.map(({ id, title }) => `${id} ${title}`).join("\n");
  const entries = useMemo(
    () =>
      found.map(
        ({ id, title }) =>
          html`<${Entry} key=${id} ...${{ app, id, title, onOpen }} current=${id === currentId} />`,
      ),
    [shown, currentId],
  );
  const importFile = async ({ target }) => {
    if (target.files.length > 0) await app.import(target.files[0]);
    target.value = "";
  };
  return html`<aside class="list" aria-label="Conversations">
    <button class="main" onClick=${() => (app.create(), onOpen())}>New conversation</button>
    <input
      id="search"
      type="search"
      placeholder="Search (/)"
      aria-label="Search conversations"
      value=${search}
      onInput=${({ target }) => setSearch(target.value)}
    />
    <ul>
      ${entries}
    </ul>
    ${found.length === 0 && html`<p class="soft">No conversation has these words.</p>`}
    <p class="row">
      <button onClick=${() => app.export(Object.keys(conversations))}>Export all</button>
      <button onClick=${() => file.current.click()}>Import</button>
      <input
        ref=${file}
        type="file"
        accept="application/json"
        hidden
        aria-label="A file of conversations"
        onChange=${importFile}
      />
    </p>
  </aside>`;
}

function Entry({ app, id, title: given, current, onOpen }) {
  const [renames, rename] = useState(false);
  const title = given || "New conversation";
  if (renames) return html`<li><${Rename} ...${{ app, id, title, done: () => rename(false) }} /></li>`;
  const open = () => {
    app.open(id);
    onOpen();
  };
  const remove = () => confirm(`Delete “${title}”? Nothing of it is kept.`) && app.remove(id);
  return html`<li aria-current=${current ? "true" : undefined}>
    <button class="open" onClick=${open} title=${title}>${title}</button>
    <span class="entry-tools">
      <button aria-label=${`Rename ${title}`} title="Rename" onClick=${() => rename(true)}>✎</button>
      <button aria-label=${`Export ${title}`} title="Export" onClick=${() => app.export([id])}>⤓</button>
      <button aria-label=${`Delete ${title}`} title="Delete" onClick=${remove}>✕</button>
    </span>
  </li>`;
}

function Rename({ app, id, title, done }) {
  const given = useRef(null);
  const end = () => {
    app.rename(id, given.current?.trim() || title);
    done();
  };
  const press = (event) => {
    if (event.key === "Escape") given.current = null;
    if (event.key === "Escape" || event.key === "Enter") end();
  };
  return html`<input
    aria-label="Name of the conversation"
    ref=${useFocus()}
    defaultValue=${title}
    onInput=${({ target }) => (given.current = target.value)}
    onKeyDown=${press}
    onBlur=${end}
  />`;
}
