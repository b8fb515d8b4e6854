// tangram/plan/aot.py and split.py, for one row and one layer

const roundHalfEven = (value) => {
  const floor = Math.floor(value);
  const rest = value - floor;
  if (rest !== 0.5) return Math.round(value);
  return floor % 2 ? floor + 1 : floor;
};

/** Into how many parts of at most `target` each size is cut, `wanted` parts in all. */
export function fitParts(sizes, target, wanted, most) {
  const limits = most ?? sizes.map(() => Infinity);
  if (sizes.length > wanted) {
    return sizes.map((size, n) =>
      Math.min(Math.max(roundHalfEven(size / target), 1), Math.max(limits[n], 1)),
    );
  }
  let [goal, counts] = [target, []];
  for (let round = 0; round < 8; round += 1) {
    counts = sizes.map((size, n) => Math.min(Math.ceil(size / goal), limits[n]));
    const excess = counts.reduce((sum, count) => sum + count, 0) / wanted;
    if (excess <= 1) break;
    goal *= Math.max(excess, 1);
  }
  return counts;
}

/** The parts of each head of a layer by its entries: ahead-of-time balancing. */
export function balanceHeads(entries, workers, tasksPerWorker, minTokens) {
  const total = entries.reduce((sum, size) => sum + size, 0);
  const wanted = workers * tasksPerWorker;
  const most = entries.map((size) => Math.floor(size / minTokens));
  const counts = fitParts(entries, Math.max(total / wanted, Number.MIN_VALUE), wanted, most);
  return counts.map((count) => Math.max(count, 1));
}

/** Tasks of equal parts, longest first, each to the worker that is free first. */
export function runTasks(entries, parts, workers) {
  const tasks = entries
    .flatMap((size, head) => Array.from({ length: parts[head] }, () => [size / parts[head], head]))
    .sort((a, b) => b[0] - a[0]);
  const free = Array.from({ length: workers }, () => 0);
  const placed = tasks.map(([size, head]) => {
    const worker = free.indexOf(Math.min(...free));
    const begin = free[worker];
    free[worker] += size;
    return { head, worker, begin, end: free[worker] };
  });
  return { tasks: placed, longest: Math.max(...free) };
}
