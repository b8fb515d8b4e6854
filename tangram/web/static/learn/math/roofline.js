// tangram/plan/cost.py (a task) and bench/roofline.py (a step of a whole model)

/** µs of one KV entry, read for so many query-head rows: `CostModel.token_us`. */
export function tokenUs(cost, queryRows) {
  const padded = Math.ceil(queryRows / cost.tile_rows) * cost.tile_rows;
  const arithmetic = ((4 * cost.head_dim) / cost.flops_per_us) * padded;
  return Math.max((2 * cost.head_dim * cost.element_bytes) / cost.bytes_per_us, arithmetic);
}

/**
 * The smallest batch at which arithmetic takes longer than reading, where every element read
 * serves each row of the batch with one multiplication and one addition.
 */
export const crossoverBatch = (card, elementBytes) =>
  Math.floor((elementBytes * card.flops_per_s) / (2 * card.bytes_per_s)) + 1;

/** FLOP/s that a card can reach at an arithmetic intensity in FLOP per byte. */
export const attainable = (card, intensity) =>
  Math.min(card.flops_per_s, intensity * card.bytes_per_s);

/** Operations and bytes of a step in which `batch` sequences of a length decode one token. */
export const decodeStep = (model, batch, contextTokens) => ({
  flops: batch * (2 * model.parameters + contextTokens * model.attention_flops),
  bytes: model.weight_bytes + batch * contextTokens * model.kv_token_bytes,
});

/** Operations and bytes of a step that computes a prompt from its start. */
export const prefillStep = (model, tokens) => ({
  flops: 2 * model.parameters * tokens + (model.attention_flops * tokens * (tokens + 1)) / 2,
  bytes: model.weight_bytes + tokens * model.kv_token_bytes,
});

/** The least seconds of a step on a card: the longer of reading and arithmetic. */
export const stepSeconds = (card, step) =>
  Math.max(step.bytes / card.bytes_per_s, step.flops / card.flops_per_s);
