/** A document that comes with the page, and questions about it that a small model answers. */
import { api } from "../api.js";

const NAME = "A winter's logbook";
// With questions and answers; tokenizers differ.
const TOKENS = 3500;
export const SAMPLE_QUESTIONS = [
  "Who is the head keeper?",
  "How often does the comet come back?",
  "How high is the hill?",
];

/** Whether a conversation of so many tokens has room for the sample; null is not known. */
export const fitsSample = (mostTokens) => mostTokens === null || mostTokens >= TOKENS;

/** @returns {Promise<Document>} see conversations/tree.js */
export const readSample = async () => ({ name: NAME, text: await api.logbook() });

/** The sample's questions that a conversation about it has not asked; none for another one. */
export function questionsLeft(messages) {
  const isAboutIt = messages[0]?.documents?.some(({ name }) => name === NAME) ?? false;
  const asked = messages.map(({ content }) => content);
  return isAboutIt ? SAMPLE_QUESTIONS.filter((question) => !asked.includes(question)) : [];
}
