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

function check(conversation, name) {
  const { title, messages, chosen, settings, changedAt } = conversation ?? {};
  const isObject = (value) => typeof value === "object" && value !== null;
  if (![messages, chosen, settings].every(isObject)) throw new Error(`${name} is incomplete.`);
  const taken = Object.entries(messages).map(([id, message]) => {
    const known = message?.parent === null || message?.parent in messages;
    const texts = [message?.content, ...(message?.documents ?? []).map(({ text }) => text)];
    if (!known || !["user", "assistant"].includes(message.role)) {
      throw new Error(`${name} has a message without its place.`);
    }
    if (!texts.every((each) => typeof each === "string")) {
      throw new Error(`${name} has a message without text.`);
    }
    return [id, { ...message, id }];
  });
  return {
    title: String(title ?? ""),
    changedAt: Number(changedAt) || Date.now(),
    settings,
    messages: Object.fromEntries(taken),
    chosen,
  };
}

/** Let the browser save `text` as a file. */
export function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
