// tangram/kernels/triton/card.py, tiling.py, gathered.py and fused_causal.py

const atLeast = (card, major, minor) =>
  card.capability[0] > major || (card.capability[0] === major && card.capability[1] >= minor);

/** The features that choose between kernels, by the card's compute capability. */
export const featuresOf = (card) => ({
  served: atLeast(card, 8, 0),
  chains: atLeast(card, 9, 0),
  copies_tiles: atLeast(card, 9, 0),
  converts_fp8: atLeast(card, 8, 9),
  multiplies_shared: card.capability[0] === 9 || card.capability[0] === 10,
});

/** Bytes of shared memory that a program with this tile takes. */
export function countSharedBytes(tile, operands, card) {
  const { head_dim: dim, element_bytes: size, hops, widens } = operands;
  const more = featuresOf(card).multiplies_shared && tile.queries >= 64 ? 1 : 0;
  const ahead = size === 4 ? 1 : Math.max(1, tile.stages - hops) + more;
  const rows = 2 * ahead * tile.entries + tile.queries;
  const taken = rows * dim * size + tile.queries * tile.entries * size + 1024;
  return widens ? taken + 2 * tile.entries * dim * (ahead + size) : taken;
}

/** The tile, or the nearest that fits: fewer stages, then half the entries. Null if none does. */
export function fitTile(tile, operands, card, least) {
  for (let entries = tile.entries; entries >= Math.min(least, tile.entries);) {
    for (let stages = tile.stages; stages > Math.min(1, tile.stages - 1); stages -= 1) {
      const smaller = { ...tile, entries, stages };
      if (countSharedBytes(smaller, operands, card) <= card.shared_bytes) return smaller;
    }
    entries = Math.floor(entries / 2);
  }
  return null;
}

/** Which kernels prefill uses for a 16-bit cache with heads of `headDim` dimensions. */
export function prefillKernels(card, headDim) {
  const wide = featuresOf(card).copies_tiles && (headDim === 64 || headDim === 128);
  return { past: wide ? "gathered" : "paged", first: wide ? "dense" : "paged" };
}
