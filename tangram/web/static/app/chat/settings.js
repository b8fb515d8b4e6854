/**
 * What a conversation may set. A field without a value is not sent: the server's default holds.
 * `kv_retention` and `kv_scorer` are chosen among those that the server has profiles for.
 */

/** Numbers: field, label, least, most and step. */
export const NUMBERS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", 0, 1000, 1],
  ["min_p", "Min p", 0, 1, "any"],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, "any"],
  ["max_tokens", "Most tokens of an answer", 1, 1_000_000, 1],
  ["seed", "Seed", 0, 2 ** 53 - 1, 1],
];

/** What holds without a value; `sampling` has the server's defaults, or is null. */
export function describeDefault(name, sampling) {
  if (name === "seed") return "none";
  if (sampling === null) return "the server's";
  const value = sampling[name];
  if (name === "temperature") return value === 0 ? "0: greedy" : `${value}; 0 is greedy`;
  if (name === "top_k") return value > 0 ? String(value) : "off";
  if (name === "max_tokens") return value === null ? "the context's rest" : String(value);
  return String(value);
}
const MOST_STOPS = 16;

/** A conversation's settings before anyone changes them. */
export const newSettings = () => ({ system: "", stop: "" });

/** The fields of a request; `settings.stop` has one text a line. */
export function requestFields(settings) {
  const fields = {};
  for (const [name] of NUMBERS) {
    if (Number.isFinite(settings[name])) fields[name] = settings[name];
  }
  if (Number.isFinite(settings.kv_retention)) {
    fields.kv_retention = settings.kv_retention;
    if (typeof settings.kv_scorer === "string") fields.kv_scorer = settings.kv_scorer;
  }
  const stops = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length > 0) fields.stop = stops.slice(0, MOST_STOPS);
  return fields;
}

/** The messages of a request: documents stand before the words of their message. */
export function requestMessages(settings, path) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  return [
    ...system,
    ...path.map(({ role, content, documents = [] }) => ({
      role,
      content: [...documents.map(spellDocument), content].filter(Boolean).join("\n\n"),
    })),
  ];
}

const spellDocument = ({ name, text }) => `Document "${name}":\n${text}`;
