/**
 * The ways to keep KV entries that the server offers, as `GET /v1/kv/model` lists them.
 *
 * @typedef {object} Retention
 * @property {number} kv_retention
 * @property {string|null} scorer
 * @property {boolean} drafted whether the server may draft for it
 */

/** What a retention is called: 1 drops nothing. */
export const nameRetention = ({ kv_retention: ratio, scorer }) =>
  ratio === 1 ? "1 – nothing dropped" : `${ratio}${scorer ? ` – ${scorer}` : ""}`;

/**
 * The fields of a request that choose `retention`; the first of a ratio needs no scorer.
 * @param {Retention} retention one of `retentions`
 * @param {Retention[]} retentions all that the server offers, in its order
 */
export function fieldsOf(retention, retentions) {
  const { kv_retention, scorer } = retention;
  const first = retentions.find((each) => each.kv_retention === kv_retention);
  return first === retention ? { kv_retention } : { kv_retention, kv_scorer: scorer };
}
