// tangram/plan/forest.py, profit.py (`choose_alone`) and cost.py

import { tokenUs } from "./roofline.js";

const rowsOf = (node) =>
  (node.tails ?? []).length + (node.children ?? []).reduce((sum, one) => sum + rowsOf(one), 0);

/**
 * What follows a node, without branches that no conversation takes. The parts of a child without
 * chunks follow themselves.
 */
function partsOf(node) {
  const tails = [...(node.tails ?? [])];
  const children = [];
  for (const child of (node.children ?? []).filter(rowsOf)) {
    if (child.chunks) {
      children.push(child);
      continue;
    }
    const parts = partsOf(child);
    tails.push(...parts.tails);
    children.push(...parts.children);
  }
  return { tails, children };
}

/** The entries of the only conversation below a node. */
function lengthOf(node, kept) {
  const { tails, children } = partsOf(node);
  return node.chunks * kept + (tails.length ? tails[0] : lengthOf(children[0], kept));
}

/**
 * A tree of conversations: a node has `chunks` sealed chunks that all below it share, `children`,
 * and `tails`, the own entries of conversations that end there. Returns `roots`, the runs that two
 * or more conversations share, and `alone`, the lengths of conversations that share nothing. A run
 * has its rows, where it ends, the ends of conversations that share no more, and children.
 */
export function forestOf(tree, keptTokens) {
  const alone = [];
  const build = (node, begin) => {
    const rows = rowsOf(node);
    let end = begin + node.chunks * keptTokens;
    let { tails, children } = partsOf(node);
    while (!tails.length && children.length === 1) {
      const [only] = children;
      end += only.chunks * keptTokens;
      ({ tails, children } = partsOf(only));
    }
    const single = children.filter((child) => rowsOf(child) === 1);
    const ends = [...tails, ...single.map((child) => lengthOf(child, keptTokens))];
    const kids = children
      .filter((child) => rowsOf(child) > 1)
      .flatMap((child) => build(child, end));
    const reached = ends.map((tokens) => end + tokens);
    if (end > begin && rows > 1) return [{ rows, end, ends: reached, children: kids }];
    alone.push(...reached);
    return kids;
  };
  const roots = build(tree, 0);
  return { roots, alone };
}

/** Which shared nodes get tasks of their own: the cheapest choice by the cost model. */
export function choosePacking(forest, cost, group, mostRows, rule) {
  const start = cost.task_us / cost.workers;
  const partial = (8 * (cost.head_dim + 1) * group) / cost.partial_bytes_per_us;
  const slope = tokenUs(cost, group);
  const spanUs = (rows, tokens) => {
    const [whole, rest] = [Math.floor(rows / mostRows), rows % mostRows];
    const full = start + tokens * tokenUs(cost, mostRows * group);
    return whole * full + (rest ? start + tokens * tokenUs(cost, rest * group) : 0);
  };
  const solve = (node, starts) => {
    const places = [...starts, node.end];
    const children = node.children.map((child) => solve(child, places));
    const tokens = node.ends.reduce((sum, end) => sum + end, 0);
    const follows = places.map(
      (place, n) =>
        node.ends.length * (start - place * slope) +
        tokens * slope +
        children.reduce((sum, child) => sum + child.best[n], 0),
    );
    const packed = starts.map(
      (begin, n) =>
        spanUs(node.rows, node.end - begin) +
        follows[follows.length - 1] +
        node.rows * (n ? 1 : 2) * partial,
    );
    const alone = packed.map((us, n) => us < follows[n]);
    return { node, children, alone, best: packed.map((us, n) => Math.min(us, follows[n])) };
  };
  const decide = (found, place, depth, begin) => {
    const packed = rule === "measured" ? found.alone[place] : rule === "naive";
    const next = packed ? found.node.end : begin;
    const below = found.children.map((one) =>
      decide(one, packed ? depth + 1 : place, depth + 1, next),
    );
    return { ...found.node, packed, begin, tail_begin: next, children: below };
  };
  const roots = forest.roots.map((root) => decide(solve(root, [0]), 0, 0, 0));
  return { roots, alone: forest.alone };
}

/** Entries that a choice reads: shared runs by their own tasks, and the conversations' tails. */
export function countEntries(chosen, mostRows) {
  const count = (node) => {
    const own = node.packed ? (node.end - node.begin) * Math.ceil(node.rows / mostRows) : 0;
    const tails = node.ends.reduce((total, end) => total + end - node.tail_begin, 0);
    return own + tails + node.children.reduce((sum, child) => sum + count(child), 0);
  };
  const alone = chosen.alone.reduce((sum, tokens) => sum + tokens, 0);
  return alone + chosen.roots.reduce((sum, root) => sum + count(root), 0);
}

/** The entries that one head reads for a tree of conversations under a rule. */
export const packedEntries = (tree, keptTokens, cost, group, mostRows, rule) =>
  countEntries(choosePacking(forestOf(tree, keptTokens), cost, group, mostRows, rule), mostRows);
