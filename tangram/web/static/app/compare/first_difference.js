/** Where two answers part. */

const wordsOf = (text) => [...text.matchAll(/\S+/g)];

/** How many words both lists begin with. */
function countCommon(one, other) {
  const at = one.findIndex(([word], index) => word !== other[index]?.[0]);
  return at < 0 ? one.length : at;
}

/**
 * The common beginning, the first word that differs, and what follows in each.
 * @returns {{same: string, word: string, rest: string}[]} for each text; `word` is "" at its end
 */
export function splitAtDifference(one, other) {
  const both = [wordsOf(one), wordsOf(other)];
  const common = countCommon(...both);
  return [one, other].map((text, side) => {
    const { index: begin, 0: word } = both[side][common] ?? { index: text.length, 0: "" };
    return { same: text.slice(0, begin), word, rest: text.slice(begin + word.length) };
  });
}

/** The number of the first word that differs, from 1; null if the answers are equal. */
export function firstDifference(one, other) {
  const both = [wordsOf(one), wordsOf(other)];
  const common = countCommon(...both);
  return both.every((words) => words.length === common) ? null : common + 1;
}
