// tangram/speculate/pace.py

/** Tokens that an iteration with `drafted` drafts yields; each is accepted with `share` < 1. */
export const expectedTokens = (share, drafted) => (1 - share ** (drafted + 1)) / (1 - share);

/**
 * How much faster decoding gets if a draft takes `draftCost` of a step, and checking γ drafts
 * `checkCost` of a step more for each of them.
 */
export const speedUp = (share, drafted, draftCost, checkCost) =>
  expectedTokens(share, drafted) / (1 + drafted * (draftCost + checkCost));

/** The number of drafts up to `most` with the largest speed-up. */
export function bestDrafts(share, draftCost, checkCost, most) {
  let best = 0;
  for (let drafted = 1; drafted <= most; drafted += 1) {
    const [now, then] = [drafted, best].map((n) => speedUp(share, n, draftCost, checkCost));
    if (now > then) best = drafted;
  }
  return best;
}
