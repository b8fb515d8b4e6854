/** Where two answers part. */

const words = (text) => text.match(/\S+\s*/g) ?? [];

/**
 * The common beginning in whole words, and what follows in each.
 * @returns {{same: string, word: string, rest: string}[]} for each text; `word` is "" at its end
 */
export function splitAtDifference(one, other) {
  const both = [words(one), words(other)];
  let at = 0;
  while (at < Math.min(both[0].length, both[1].length) && both[0][at].trim() === both[1][at].trim()) {
    at += 1;
  }
  return both.map((list) => ({
    same: list.slice(0, at).join(""),
    word: list[at] ?? "",
    rest: list.slice(at + 1).join(""),
  }));
}

/** The number of the first word that differs, from 1; null if the answers are equal. */
export function firstDifference(one, other) {
  const [left, right] = [words(one), words(other)];
  for (let at = 0; at < Math.max(left.length, right.length); at += 1) {
    if (left[at]?.trim() !== right[at]?.trim()) return at + 1;
  }
  return null;
}
