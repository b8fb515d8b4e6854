/**
 * A conversation is a tree of messages: editing and regenerating add branches, nothing is lost.
 * These functions change nothing in place; each returns a new conversation.
 *
 * @typedef {{name: string, text: string}} Document
 * @typedef {object} Message
 * @property {string} id
 * @property {string|null} parent null for the first of a conversation
 * @property {"user"|"assistant"} role
 * @property {string} content
 * @property {Document[]} [documents] of a user's message
 * @property {string} [thought] of an answer
 * @property {Run} [run] how an answer came to be, see chat/answer.js
 * @property {string} [fault] why an answer has no end
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} changedAt when a message was added last, in milliseconds since 1970
 * @property {object} settings see chat/settings.js
 * @property {Object<string, Message>} messages in the order in which they were added
 * @property {Object<string, string>} chosen parent ("" for none) to the child that is shown
 */

export const newId = () => crypto.randomUUID?.() ?? fallbackId();

/** Outside HTTPS and the loopback browsers have no randomUUID. */
function fallbackId() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Conversation} */
export function newConversation(settings) {
  const changedAt = Date.now();
  return { id: newId(), title: "", changedAt, settings, messages: {}, chosen: {} };
}

/** The messages that are shown, from the first to the last. */
export function shownMessages(conversation) {
  const path = [];
  const visited = new Set();
  let id = conversation.chosen[""];
  while (id !== undefined && conversation.messages[id] && !visited.has(id)) {
    visited.add(id);
    path.push(conversation.messages[id]);
    id = conversation.chosen[id];
  }
  return path;
}

/** The messages from the first to `id`, whether they are shown or not. */
export function messagesUpTo(conversation, id) {
  const path = [];
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) {
    path.unshift(at);
  }
  return path;
}

/** Those with the same parent as `message`, in the order of their making. */
export const siblings = (conversation, message) =>
  Object.values(conversation.messages).filter((other) => other.parent === message.parent);

/** Add `message` and show it. The first words of the first question are the title. */
export function addMessage(conversation, message) {
  const title = conversation.title || makeTitle(message);
  const shown = showMessage(
    { ...conversation, messages: { ...conversation.messages, [message.id]: message } },
    message.id,
  );
  return { ...shown, title, changedAt: Date.now() };
}

/** Show the branch that `id` begins. */
export function showMessage(conversation, id) {
  const { parent } = conversation.messages[id];
  return { ...conversation, chosen: { ...conversation.chosen, [parent ?? ""]: id } };
}

/** Replace fields of one message. */
export function changeMessage(conversation, id, changes) {
  const message = { ...conversation.messages[id], ...changes };
  return { ...conversation, messages: { ...conversation.messages, [id]: message } };
}

const MOST_TITLE = 60;

function makeTitle(message) {
  const words = (message.content || message.documents?.[0]?.name || "").trim();
  const line = words.replace(/\s+/g, " ");
  return line.length > MOST_TITLE ? `${line.slice(0, MOST_TITLE - 1)}…` : line;
}

/** Whether every word of `search` is in the title, a message, or a document. */
export function matches(conversation, search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return true;
  const texts = Object.values(conversation.messages).flatMap((message) => [
    message.content,
    ...(message.documents ?? []).map((document) => `${document.name}\n${document.text}`),
  ]);
  const whole = [conversation.title, ...texts].join("\n").toLowerCase();
  return words.every((word) => whole.includes(word));
}
