// lab/tangram_lab/naive.py

/** Positions that naive decoding projects: p + (p + 1) + … + (p + n − 1). */
export const countNaivePositions = (promptTokens, tokens) =>
  (tokens * (2 * promptTokens + tokens - 1)) / 2;

/** Positions with a cache: the prompt once, then one a step. */
export const countCachedPositions = (promptTokens, tokens) => promptTokens + tokens - 1;
