/** The frame of the page: which view is shown, the bar above it, and keys that work everywhere. */
import { keys } from "./api.js";
import { CachePanel } from "./cache/panel.js";
import { Chat } from "./chat/chat.js";
import { Compare } from "./compare/compare.js";
import { ConversationList } from "./conversations/list.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { ServerView } from "./server/server.js";
import { useStore } from "./store.js";
import { switchTheme } from "./theme.js";

const VIEWS = { chat: "Chat", compare: "Compare", server: "Server" };
const viewOfAddress = () => {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "chat";
};

/** The view that the address names after its #. */
function useView() {
  const [view, show] = useState(viewOfAddress);
  useEffect(() => {
    const follow = () => show(viewOfAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return view;
}

export function Page({ app }) {
  const view = useView();
  const drawer = useStore(app.store, (value) => value.drawer);
  const [help, showHelp] = useState(false);
  useKeys(app, view, showHelp);
  const toggle = (name) => app.openDrawer(drawer === name ? null : name);
  return html`
    <${Bar} app=${app} view=${view} drawer=${drawer} toggle=${toggle} showHelp=${showHelp} />
    <${Notice} app=${app} />
    ${view === "chat" &&
    html`<main class="talk" data-drawer=${drawer ?? ""}>
      <${ConversationList} app=${app} onOpen=${() => app.openDrawer(null)} />
      <${Chat} app=${app} />
      <${CachePanel} app=${app} />
    </main>`}
    ${view === "compare" && html`<main><${Compare} app=${app} /></main>`}
    ${view === "server" && html`<main><${ServerView} app=${app} /></main>`}
    <${KeyDialog} app=${app} />
    <${HelpDialog} open=${help} close=${() => showHelp(false)} />
  `;
}

function Bar({ app, view, drawer, toggle, showHelp }) {
  const model = useStore(app.store, ({ modelName }) => modelName);
  const connected = useStore(app.watch.status, (status) => status.connected);
  return html`<header class="bar">
    <h1>Tangram</h1>
    <nav aria-label="Views">
      ${Object.entries(VIEWS).map(
        ([name, label]) =>
          html`<a href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${label}</a>`,
      )}
      <a href="/learn">Learn</a>
      <a href="/docs">API</a>
    </nav>
    <span class="served" title="The served model, and whether the page follows the engine">
      <span class="lamp" data-on=${connected} aria-hidden="true"></span>
      ${model ?? "no model"}<span class="unseen">, ${connected ? "connected" : "not connected"}</span>
    </span>
    <span class="tools">
      ${view === "chat" &&
      html`<button
          class="narrow-only"
          aria-expanded=${drawer === "list"}
          aria-label="Conversations"
          title="Conversations"
          onClick=${() => toggle("list")}
        >
          ☰
        </button>
        <button
          class="narrow-only"
          aria-expanded=${drawer === "cache"}
          onClick=${() => toggle("cache")}
        >
          Cache
        </button>`}
      <button onClick=${switchTheme} aria-label="Switch between dark and light">◐</button>
      <button onClick=${() => app.askForKey()}>API key</button>
      <button onClick=${() => showHelp(true)} aria-label="Keys">?</button>
    </span>
  </header>`;
}

function Notice({ app }) {
  const notice = useStore(app.store, (value) => value.notice);
  return html`<div role="status" class="notice" hidden=${notice === null}>
    ${notice !== null &&
    html`<span>${notice}</span>
      <button onClick=${() => app.say(null)} aria-label="Close this message">✕</button>`}
  </div>`;
}

/** A dialog of the browser, which keeps the focus inside; `open` shows it. */
export function Dialog({ open, close, title, children }) {
  const element = useRef();
  useEffect(() => {
    if (open && !element.current.open) element.current.showModal();
    if (!open && element.current.open) element.current.close();
  }, [open]);
  return html`<dialog ref=${element} onCancel=${close} aria-label=${title}>
    ${open &&
    html`<h2>${title}</h2>
      ${children}`}
  </dialog>`;
}

function KeyDialog({ app }) {
  const open = useStore(app.store, ({ needsKey }) => needsKey);
  const close = () => app.store.set({ needsKey: false });
  const save = (event) => {
    event.preventDefault();
    const { key, remember } = event.target.elements;
    close();
    app.setKey(key.value.trim(), remember.checked);
  };
  return html`<${Dialog} open=${open} close=${close} title="API key">
    <form onSubmit=${save}>
      <p>A server with keys answers only with one of them. The key goes to this server alone.</p>
      <label>
        Key
        <input name="key" type="password" autocomplete="off" value=${keys.get()} />
      </label>
      <label class="check">
        <input name="remember" type="checkbox" checked=${keys.remembered} />
        Keep it in this browser; otherwise this tab alone keeps it.
      </label>
      <p class="row">
        <button class="main">Use this key</button>
        <button type="button" onClick=${close}>Close</button>
      </p>
    </form>
  <//>`;
}

const KEYS = [
  ["Enter, Ctrl+Enter", "send the question"],
  ["Shift+Enter", "a new line"],
  ["Escape", "stop the answer"],
  ["/", "search conversations"],
  ["n", "a new conversation"],
  ["c", "write a question"],
  ["?", "this list"],
  ["arrows", "in the text, the heads, the pages and the steps: go to the next one"],
];

function HelpDialog({ open, close }) {
  return html`<${Dialog} open=${open} close=${close} title="Keys">
    <dl class="keys">
      ${KEYS.map(([key, meaning]) => html`<dt><kbd>${key}</kbd></dt><dd>${meaning}</dd>`)}
    </dl>
    <button onClick=${close}>Close</button>
  <//>`;
}

/** Keys that work wherever nothing is being typed. */
function useKeys(app, view, showHelp) {
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
        if (view === "compare") app.comparison.stop();
        else app.stop();
      }
      if (event.target.closest("input, textarea, select, dialog, [contenteditable]")) return;
      const act = {
        "/": () => document.getElementById("search")?.focus(),
        c: () => document.getElementById("question")?.focus(),
        n: () => app.create(),
        "?": () => showHelp(true),
      }[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [app, view]);
}
