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
  // Messages get new ids: one of the file could be the name of something that every object has.
  const ids = new Map();
  const taken = {};
  for (const [given, message] of Object.entries(messages)) {
    checkMessage(message, name);
    // An answer stands after its question, so no message is below itself.
    if (message.parent !== null && !ids.has(message.parent)) {
      throw new Error(`${name} has a message without its place.`);
    }
    const id = newId();
    taken[id] = takeMessage(message, id, ids.get(message.parent) ?? null);
    ids.set(given, id);
  }
  const { system, stop } = settings;
  const known = Object.entries(chosen).filter(
    ([parent, id]) => (parent === "" || ids.has(parent)) && ids.has(id),
  );
  return {
    title: String(title ?? ""),
    changedAt: Number(changedAt) || Date.now(),
    settings: { ...settings, system: String(system ?? ""), stop: String(stop ?? "") },
    messages: taken,
    chosen: Object.fromEntries(known.map(([parent, id]) => [ids.get(parent) ?? "", ids.get(id)])),
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

/** A message with what the page shows of it; what is of another kind is left out. */
function takeMessage({ role, content, documents = [], thought, fault, run }, id, parent) {
  return {
    ...{ id, parent, role, content },
    documents: documents.map(({ name, text }) => ({ name, text })),
    ...(typeof thought === "string" && { thought }),
    ...(typeof fault === "string" && { fault }),
    ...(isObject(run) && { run: takeRun(run) }),
  };
}

const RUN_KINDS = {
  requestId: "string",
  answerId: "string",
  finish: "string",
  kvRetention: "number",
  firstTokenS: "number",
  decodeS: "number",
  tokensPerS: "number",
  sealedChunks: "number",
};

/** @returns {Run} see chat/answer.js */
const takeRun = (run) => ({
  ...Object.fromEntries(
    Object.entries(RUN_KINDS).map(([name, kind]) => [name, typeof run[name] === kind ? run[name] : null]),
  ),
  usage: isObject(run.usage) ? takeNumbers(run.usage) : null,
});

/** The numbers of `counts`, and of what it has inside. */
const takeNumbers = (counts) =>
  Object.fromEntries(
    Object.entries(counts).flatMap(([name, value]) => {
      if (typeof value === "number") return [[name, value]];
      return isObject(value) ? [[name, takeNumbers(value)]] : [];
    }),
  );

/** Let the browser save `text` as a file. */
export function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
