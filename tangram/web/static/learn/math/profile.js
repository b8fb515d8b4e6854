// tangram/compress/profile.py and groups.py

/** B = min(1, μ + α·σ) for each head. */
export const budgetsOf = (mean, std, alpha) =>
  mean.map((row, l) => row.map((mu, h) => Math.min(1, mu + alpha * std[l][h])));

/** Heads sorted by budget and cut into groups of `headsPerPage`: [[layer, head], …] each. */
export function clusterHeads(budgets, layers, headsPerPage, across) {
  const heads = budgets.map((row, l) =>
    row.map((budget, head) => ({ budget, head: [layers[l], head] })),
  );
  return (across === "model" ? [heads.flat()] : heads).flatMap((some) => {
    const order = [...some].sort((a, b) => b.budget - a.budget).map((one) => one.head);
    return Array.from({ length: Math.ceil(order.length / headsPerPage) }, (_, group) =>
      order.slice(group * headsPerPage, (group + 1) * headsPerPage),
    );
  });
}

/** Whole pages of a sealed chunk that ρ pays for. ρ counts in thousandths, so it is exact. */
export const affordablePages = (heads, options) =>
  Math.floor(
    (Math.round(options.retention * 1000) * heads * options.chunk_tokens) /
      (1000 * options.page_tokens * options.heads_per_page),
  );

/** Pages of each group: the next page goes to the smallest (n − ½) / budget (Sainte-Laguë). */
export function allotPages(budgets, heads, options) {
  const chunkPages = options.chunk_tokens / options.page_tokens;
  const pages = budgets.map(() => options.min_pages);
  const turns = budgets.flatMap((budget, group) =>
    Array.from({ length: chunkPages - options.min_pages }, (_, more) => {
      const number = options.min_pages + 1 + more;
      return { turn: (number - 0.5) / Math.max(budget, 1e-12), budget, group, number };
    }),
  );
  turns.sort(
    (a, b) => a.turn - b.turn || b.budget - a.budget || a.group - b.group || a.number - b.number,
  );
  const spare = affordablePages(heads, options) - options.min_pages * budgets.length;
  for (const { group } of turns.slice(0, Math.max(0, spare))) pages[group] += 1;
  return pages;
}

/** Groups, their pages and the share of a chunk that they occupy, from a profile's statistics. */
export function deriveProfile(profile, retention) {
  const budgets = budgetsOf(profile.mean, profile.std, profile.alpha);
  const groups = clusterHeads(budgets, profile.layers, profile.heads_per_page, profile.grouping);
  const row = new Map(profile.layers.map((layer, index) => [layer, index]));
  const largest = groups.map((group) =>
    Math.max(...group.map(([layer, head]) => budgets[row.get(layer)][head])),
  );
  const always = profile.sink_tokens + profile.window_tokens;
  const min_pages = Math.max(1, Math.ceil(always / profile.page_tokens));
  const heads = budgets.flat().length;
  const sealed_pages = allotPages(largest, heads, { ...profile, retention, min_pages });
  const entries = sealed_pages.reduce((sum, pages) => sum + pages, 0) * profile.heads_per_page;
  const realised_retention = (entries * profile.page_tokens) / (heads * profile.chunk_tokens);
  return { groups, sealed_pages, realised_retention };
}

/** The smallest ρ at which each group of a profile has its always-kept pages. */
export function smallestRetention(profile) {
  const heads = profile.mean.flat().length;
  const always = profile.sink_tokens + profile.window_tokens;
  const pages = Math.max(1, Math.ceil(always / profile.page_tokens));
  const runs = profile.grouping === "model" ? [heads] : profile.mean.map((row) => row.length);
  const groups = runs.reduce((sum, run) => sum + Math.ceil(run / profile.heads_per_page), 0);
  const slots = pages * groups * profile.heads_per_page * profile.page_tokens;
  return Math.ceil((slots / (heads * profile.chunk_tokens)) * 1e4) / 1e4;
}
