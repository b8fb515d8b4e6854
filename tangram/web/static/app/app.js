/** What the page can do; views call these, and render what is in `store`. */
import { api, keys } from "./api.js";
import { CacheWatch } from "./cache/watch.js";
import { speedOf, streamAnswer, usageOf } from "./chat/answer.js";
import { newSettings, requestFields, requestMessages } from "./chat/settings.js";
import { Comparison } from "./compare/comparison.js";
import { exportText, importText, saveFile } from "./conversations/transfer.js";
import {
  addMessage,
  changeMessage,
  messagesUpTo,
  newConversation,
  newId,
  showMessage,
  shownMessages,
} from "./conversations/tree.js";
import { Store } from "./store.js";

const SAVE_MS = 1000;
const RETRY_MS = 2000;
// A stopped request has left the batch a step later.
const [END_TRIES, END_PAUSE_MS] = [10, 100];
// The first token that is asked for where none are wanted.
const NO_TOKENS = 1_000_000;

/**
 * The store has `conversations` (id to Conversation), `currentId`, `running` (ids of conversations
 * whose answer is being written), `modelName`, `sampling` (what holds where a request states
 * nothing, or null), `mostTokens` (of a conversation, or null if not known), `needsKey`, `notice` (a sentence, or null), and `drawer`: "list" or "cache"
 * where a narrow page shows it instead of the conversation, or null.
 */
export class App {
  watch = new CacheWatch();
  comparison = new Comparison(this);
  #database;
  #abort = new Map();
  #saving = new Map();
  #silent = false;
  // Other tabs of this page hear which conversation was saved or removed.
  #tabs = new BroadcastChannel("tangram.conversations");

  /** @param database see conversations/database.js; null keeps nothing */
  constructor(database) {
    this.#database = database;
    this.#tabs.onmessage = ({ data }) => this.#takeOver(data);
    this.store = new Store({
      conversations: {},
      currentId: null,
      running: [],
      modelName: null,
      sampling: null,
      mostTokens: null,
      needsKey: false,
      drawer: null,
      notice: database === null ? "This browser keeps no conversations: export them." : null,
    });
    this.watch.status.subscribe(({ model }) => this.#takeModel(model));
  }

  /** The server may have restarted with another model. */
  #takeModel(described) {
    const name = described?.model ?? null;
    if (name === null || name === this.store.value.modelName) return;
    this.store.set({ modelName: name, sampling: null, mostTokens: null });
  }

  /** Read what is kept, and ask the server what it serves. */
  async start() {
    const kept = (await this.#database?.all()) ?? [];
    kept.sort((one, other) => other.changedAt - one.changedAt);
    this.store.set({ conversations: Object.fromEntries(kept.map((each) => [each.id, each])) });
    if (kept.length > 0) this.open(kept[0].id);
    else this.create();
    await this.connect();
  }

  /** Ask for the model with the present key, and follow the events. */
  async connect() {
    try {
      const { data } = await api.models();
      const { id, default_sampling: sampling, max_model_len: mostTokens = null } = data[0];
      this.store.set({ modelName: id, sampling, mostTokens, needsKey: false });
    } catch (error) {
      this.#meet(error);
      return;
    }
    if (this.#silent) this.say(null);
    this.#silent = false;
    this.watch.connect();
  }

  setKey(key, remember) {
    keys.set(key, remember);
    return this.connect();
  }

  askForKey() {
    this.store.set({ needsKey: true });
  }

  say(notice) {
    this.store.set({ notice });
  }

  #meet(error) {
    if (error.status === 401) this.store.set({ needsKey: true });
    else this.say(error.message);
    this.#silent = error.status === 0;
    if (this.#silent) setTimeout(() => this.connect(), RETRY_MS);
  }

  // --- conversations ---

  get current() {
    return this.store.value.conversations[this.store.value.currentId];
  }

  open(id) {
    this.store.set({ currentId: id });
    this.watchLast();
  }

  /** A new conversation with the settings of the present one; an empty one is taken instead. */
  create() {
    const empty = Object.values(this.store.value.conversations).find(
      ({ messages }) => Object.keys(messages).length === 0,
    );
    const conversation = empty ?? newConversation(this.current?.settings ?? newSettings());
    this.#put(conversation);
    this.open(conversation.id);
  }

  rename(id, title) {
    this.#change(id, (conversation) => ({ ...conversation, title }));
  }

  setSettings(id, changes) {
    this.#change(id, (conversation) => ({
      ...conversation,
      settings: { ...conversation.settings, ...changes },
    }));
  }

  async remove(id) {
    this.stop(id);
    clearTimeout(this.#saving.get(id));
    this.#saving.delete(id);
    const { [id]: removed, ...conversations } = this.store.value.conversations;
    this.store.set({ conversations });
    this.#leave(id);
    await this.#database?.remove(id);
    this.#tabs.postMessage(id);
  }

  /** Open another conversation than `id`, which is gone, if it was open. */
  #leave(id) {
    const { conversations, currentId } = this.store.value;
    if (currentId !== id) return;
    const next = Object.values(conversations).sort((a, b) => b.changedAt - a.changedAt)[0];
    if (next) this.open(next.id);
    else this.create();
  }

  /** Take a conversation as another tab has saved it, or has removed it. */
  async #takeOver(id) {
    if (this.#abort.has(id)) return;
    const saved = await this.#database?.get(id);
    const { [id]: known, ...others } = this.store.value.conversations;
    this.store.set({ conversations: saved ? { ...others, [id]: saved } : others });
    if (!saved) this.#leave(id);
  }

  export(ids) {
    const chosen = ids.map((id) => this.store.value.conversations[id]);
    const written = chosen.filter(({ messages }) => Object.keys(messages).length > 0);
    saveFile("tangram-conversations.json", exportText(written));
  }

  async import(file) {
    try {
      const imported = importText(await file.text());
      for (const conversation of imported) this.#put(conversation);
      if (imported.length > 0) this.open(imported[0].id);
      this.say(`${imported.length} conversations were imported.`);
    } catch (error) {
      this.say(error.message);
    }
  }

  /** Put a conversation into the store and the database; while an answer grows, now and then. */
  #put(conversation) {
    const { id } = conversation;
    this.store.set({ conversations: { ...this.store.value.conversations, [id]: conversation } });
    if (!this.#abort.has(id)) this.#save(id);
    else if (!this.#saving.has(id)) {
      this.#saving.set(id, setTimeout(() => this.#save(id), SAVE_MS));
    }
  }

  #save(id) {
    clearTimeout(this.#saving.get(id));
    this.#saving.delete(id);
    this.#database?.put(this.store.value.conversations[id]).then(
      () => this.#tabs.postMessage(id),
      ({ message }) => this.say(`The browser could not keep the conversation: ${message}`),
    );
  }

  /** Save at once what waits to be saved, as when the page goes. */
  flush() {
    for (const id of [...this.#saving.keys()]) this.#save(id);
  }

  #change(id, change) {
    const conversation = this.store.value.conversations[id];
    if (conversation) this.#put(change(conversation));
  }

  // --- messages ---

  /** Add a question after the last shown message, and ask for its answer. */
  send(content, documents) {
    const conversation = this.current;
    const parent = shownMessages(conversation).at(-1)?.id ?? null;
    return this.#ask(conversation.id, { parent, content, documents });
  }

  /** Ask again with other words: a branch beside `message`. */
  edit(message, content) {
    const { parent, documents } = message;
    return this.#ask(this.current.id, { parent, content, documents });
  }

  #ask(id, fields) {
    const question = { id: newId(), role: "user", ...fields };
    this.#change(id, (conversation) => addMessage(conversation, question));
    return this.#answer(id, question.id);
  }

  /** Another answer to the question before `message`: a branch beside it. */
  regenerate(message) {
    return this.#answer(this.current.id, message.parent);
  }

  showBranch(messageId) {
    this.#change(this.store.value.currentId, (conversation) =>
      showMessage(conversation, messageId),
    );
    this.watchLast();
  }

  stop(id = this.store.value.currentId) {
    this.#abort.get(id)?.abort();
  }

  /** Have an answer written below the question `parent`. */
  async #answer(id, parent) {
    if (this.#abort.has(id)) return;
    const { settings } = this.store.value.conversations[id];
    const path = messagesUpTo(this.store.value.conversations[id], parent);
    const answer = { id: newId(), parent, role: "assistant", content: "" };
    this.#change(id, (conversation) => addMessage(conversation, answer));
    const change = (changes) =>
      this.#change(id, (conversation) => changeMessage(conversation, answer.id, changes));
    const abort = new AbortController();
    this.#begin(id, abort);
    try {
      const body = {
        model: this.store.value.modelName,
        messages: requestMessages(settings, path),
        ...requestFields(settings),
      };
      const run = await streamAnswer(body, abort.signal, ({ run, ...texts }) => {
        change({ ...texts, run });
        this.#watchRun(id, answer.id, run);
      });
      const ended = { ...run, ...(await this.#readEnd(run)) };
      change({ run: { ...ended, tokensPerS: ended.usage && speedOf(ended) } });
    } catch (error) {
      change({ fault: error.message });
      if (error.status === 401) this.askForKey();
    } finally {
      this.#end(id);
    }
  }

  /**
   * What the server knows of an answer at its end: the chunks that its request sealed itself, and
   * the usage, which the stream of a stopped answer does not tell. Nothing where it forgot it.
   */
  async #readEnd({ requestId, answerId, usage }) {
    const { model } = this.watch.status.value;
    if (model === null) return {};
    const name = answerId ?? this.watch.heardOf(requestId);
    if (name === null) return {};
    let view = null;
    const tries = usage === null ? END_TRIES : 1;
    for (let tried = 0; tried < tries && view?.state !== "ended"; tried += 1) {
      if (tried > 0) await new Promise((resolve) => setTimeout(resolve, END_PAUSE_MS));
      view = await api.request(name, NO_TOKENS).catch(() => null);
      if (view === null) return {};
    }
    const reused = Math.floor(view.cached_tokens / model.chunk_tokens);
    const sealedChunks = view.sealed_chunks - reused;
    return { sealedChunks, usage: usage ?? usageOf(view) };
  }

  #begin(id, abort) {
    this.#abort.set(id, abort);
    this.store.set({ running: [...this.#abort.keys()] });
  }

  #end(id) {
    this.#abort.delete(id);
    if (this.store.value.conversations[id]) this.#save(id);
    this.store.set({ running: [...this.#abort.keys()] });
  }

  // --- the cache ---

  openDrawer(drawer) {
    this.store.set({ drawer });
  }

  /** Show the cache of an answer. */
  watchAnswer({ run }) {
    this.watch.show(run?.requestId, run?.answerId);
  }

  /** Show the cache of the last answer that is shown. */
  watchLast() {
    const last = shownMessages(this.current).findLast(({ role }) => role === "assistant");
    this.watchAnswer(last ?? {});
  }

  #watchRun(id, messageId, run) {
    if (id !== this.store.value.currentId) return;
    const shown = shownMessages(this.current).at(-1);
    if (shown?.id !== messageId) return;
    if (run.finish === null) this.watch.follow(run.requestId, run.answerId);
    else this.watchAnswer({ run });
  }
}
