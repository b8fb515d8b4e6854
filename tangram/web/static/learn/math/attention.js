// tangram/kernels/reference.py: softmax_part and merge_parts

const dot = (a, b) => a.reduce((sum, value, place) => sum + value * b[place], 0);

/** Attention of one query over some entries, as a part that can be merged: {out, lse}. */
export function softmaxPart(query, keys, values, scaling) {
  const scores = keys.map((key) => dot(query, key) * scaling);
  const peak = Math.max(...scores);
  const total = scores.reduce((sum, score) => sum + Math.exp(score - peak), 0);
  const lse = peak + Math.log(total);
  const weights = scores.map((score) => Math.exp(score - lse));
  const out = values[0].map((_, d) =>
    dot(
      weights,
      values.map((value) => value[d]),
    ),
  );
  return { out, lse };
}

/** The parts of one query in order, merged by their log-sum-exps. */
export function mergeParts(parts) {
  const peak = Math.max(...parts.map((part) => part.lse));
  const lse = peak + Math.log(parts.reduce((sum, part) => sum + Math.exp(part.lse - peak), 0));
  const weights = parts.map((part) => Math.exp(part.lse - lse));
  const out = parts[0].out.map((_, d) =>
    dot(
      weights,
      parts.map((part) => part.out[d]),
    ),
  );
  return { out, lse };
}

/**
 * Online softmax over scores with one value each, a tile at a time.
 * A step has the running maximum, the factor that rescales what was summed before, the sum and
 * the accumulator. The result is the last accumulator over the last sum.
 */
export function onlineSoftmax(scores, values, tile) {
  let [peak, sum, accumulator] = [-Infinity, 0, 0];
  const steps = [];
  for (let begin = 0; begin < scores.length; begin += tile) {
    const some = scores.slice(begin, begin + tile);
    const higher = Math.max(peak, ...some);
    const factor = peak === -Infinity ? 0 : Math.exp(peak - higher);
    const weights = some.map((score) => Math.exp(score - higher));
    sum = sum * factor + weights.reduce((total, weight) => total + weight, 0);
    accumulator = accumulator * factor + dot(weights, values.slice(begin, begin + tile));
    peak = higher;
    steps.push({ begin, end: begin + some.length, peak, factor, weights, sum, accumulator });
  }
  return { steps, result: accumulator / sum };
}

/** Causal attention of `tokens` tokens: tiles of the score matrix, and those that are computed. */
export function countTiles(tokens, queries, entries) {
  let computed = 0;
  const [down, across] = [Math.ceil(tokens / queries), Math.ceil(tokens / entries)];
  for (let row = 0; row < down; row += 1) {
    const last = Math.min(tokens, (row + 1) * queries) - 1;
    computed += Math.floor(last / entries) + 1;
  }
  return { all: down * across, computed };
}
