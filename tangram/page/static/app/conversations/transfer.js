/** Conversations as a JSON file, and back. */
import { newId } from "./tree.js";

const FORMAT = "tangram-conversations";
const VERSION = 1;

/** The file's text. */
export const exportText = (conversations) =>
  JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);

/**
 * The conversations of a file, with new ids, so that importing twice loses nothing.
 * @throws {Error} with a sentence that says what is wrong with the file.
 */
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("The file has no conversations of this page.");
  }
  if (file.version !== VERSION) {
    throw new Error(`The file has version ${file.version}, this page reads version ${VERSION}.`);
  }
  return file.conversations.map((conversation, at) => ({
    ...check(conversation, `Conversation ${at + 1}`),
    id: newId(),
  }));
}

const isObject = (value) => typeof value === "object" && value !== null;

/** @throws {Error} if the page could not show, change or send the conversation */
function check(conversation, name) {
  const { title, messages, chosen, settings, changedAt } = conversation ?? {};
  if (![messages, chosen, settings].every(isObject)) throw new Error(`${name} is incomplete.`);
  const taken = new Map();
  for (const [id, message] of Object.entries(messages)) {
    checkMessage(message, name);
    // An answer stands after its question, so no message is below itself.
    if (message.parent !== null && !taken.has(message.parent)) {
      throw new Error(`${name} has a message without its place.`);
    }
    taken.set(id, { ...message, id });
  }
  const { system, stop } = settings;
  return {
    title: String(title ?? ""),
    changedAt: Number(changedAt) || Date.now(),
    settings: { ...settings, system: String(system ?? ""), stop: String(stop ?? "") },
    messages: Object.fromEntries(taken),
    chosen,
  };
}

function checkMessage(message, name) {
  const { role, content, documents = [] } = message ?? {};
  if (!["user", "assistant"].includes(role) || !Array.isArray(documents)) {
    throw new Error(`${name} has a message of neither side.`);
  }
  const texts = [content, ...documents.flatMap((each) => [each?.name, each?.text])];
  if (!texts.every((each) => typeof each === "string")) {
    throw new Error(`${name} has a message without text.`);
  }
}

/** Let the browser save `text` as a file. */
export function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
