"""The prefix forest of a batch: which rows share which leading units of their caches.

This is PAT's block-table tree (pack). A row's cache consists of *units*: first its sealed chunks,
then its full raw pages. A page is unique while it is held. So the page that a probe head has at a
unit names the unit for all heads and layers.

Worked example, 4 rows and their units:

    row 0   7 8 9           order  0 2 1 3
    row 1   5 6
    row 2   7 8 4           node   parent  depth  rows at  units
    row 3   5 6 2           0      0       0      0..2     0..2    rows 0 and 2 share units 7 8
                            1      1       0      2..4     0..2    rows 1 and 3 share units 5 6

The units after a row's last shared unit are its own tail: 9 of row 0, nothing of row 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Int32, Int64


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes are runs of units shared by the same two or more rows.

    Parents come before children, level by level. `order` [R]: the row at each position; a node's
    rows are `order[row_begin:row_end]`. Per node [N]: `parent` (a root is its own), `depth` (0 at a
    root), and `unit_end`: its units begin where the parent's end, a root's at 0. `sealed_units`
    [R], by row: how many of its leading units are sealed chunks.
    """

    order: Int64
    sealed_units: Int64
    parent: Int64
    depth: Int64
    row_begin: Int64
    row_end: Int64
    unit_end: Int64

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.parent)

    @cached_property
    def levels(self) -> tuple[slice, ...]:
        """The nodes of each depth, from the roots down."""
        bounds = np.append(0, np.cumsum(np.bincount(self.depth))).tolist()
        return tuple(slice(begin, end) for begin, end in pairwise(bounds))

    @cached_property
    def first_row(self) -> Int64:
        """[N]: the row at the first position of each node."""
        return self.order[self.row_begin]

    @cached_property
    def rows(self) -> Int64:
        """[N]: how many rows share each node."""
        return self.row_end - self.row_begin

    def positions(self, level: slice) -> tuple[Int64, Int64]:
        """[n], [n]: the positions that the nodes of a level cover, ascending, and their nodes."""
        node = np.repeat(np.arange(level.start, level.stop), self.rows[level])
        return runs(self.row_begin[level], self.rows[level]), node

    @cached_property
    def deepest(self) -> Int64:
        """[R]: by position, the last node that holds it; N where the row shares nothing."""
        node = np.full(len(self.order), self.nodes)
        for level in self.levels:
            position, owner = self.positions(level)
            node[position] = owner
        return node


def runs(begin: Int64, count: Int64) -> Int64:
    """The integers begin[i], begin[i] + 1, …, `count[i]` of them, one run after the other."""
    before = np.cumsum(count) - count
    return np.asarray(np.arange(int(count.sum())) + np.repeat(begin - before, count))


def units_of(
    tables: Int32, table: Int32 | Int64, sealed_pages: Int64, sealed_chunks: Int64, raw_pages: Int64
) -> tuple[Int64, Int64]:
    """`units` [R, K] and `unit_count` [R] of each row for `build_forest`.

    They come from the flat block tables. Everything is by row [R], for one probe head of a
    full-attention layer. `table` is the offset of its first page entry, and `sealed_pages` the
    pages that its group keeps of a sealed chunk. `raw_pages` are the full pages of the tail (a page
    that is still being written cannot be shared). The first and the last page of a chunk name it:
    of chunks that decode filled, two may share their oldest pages alone, which come first or last.
    """
    count = sealed_chunks + raw_pages
    unit = np.arange(int(count.max(initial=0)))
    sealed = sealed_chunks[:, None]
    begin = np.minimum(unit, sealed) * sealed_pages[:, None] + np.maximum(unit - sealed, 0)
    last = begin + np.where(unit < sealed, sealed_pages[:, None] - 1, 0)
    valid = unit < count[:, None]
    ends = [
        np.where(valid, tables[np.where(valid, table[:, None] + page, 0)], 0)
        for page in (begin, last)
    ]
    return ends[0].astype(np.int64) << 32 | ends[1], count


def build_forest(units: Int64, unit_count: Int64, sealed_units: Int64) -> Forest:
    """The forest of rows whose leading units are `units` [R, K], `unit_count` [R] of them valid.

    `sealed_units` [R] is how many are sealed chunks. Raises `ConfigError` if the shapes or counts
    disagree.
    """
    rows, width = units.shape
    if len(unit_count) != rows or len(sealed_units) != rows:
        raise ConfigError(
            f"units has {rows} rows, unit_count {len(unit_count)}, sealed_units "
            f"{len(sealed_units)}: they must agree"
        )
    if (unit_count > width).any() or (unit_count < 0).any():
        raise ConfigError(
            f"unit_count is {unit_count.max()} for a row, it must lie in 0 to {width}, the width "
            "of units"
        )
    order, shared = _sort(units, unit_count)
    nodes = _nodes(shared, rows)
    return Forest(order, np.asarray(sealed_units, np.int64), *nodes)


def _sort(units: Int64, unit_count: Int64) -> tuple[Int64, Int64]:
    """An order of rows by prefix, and the number of units that neighbours share [R - 1]."""
    rows, width = units.shape
    if not width:
        return np.arange(rows), np.zeros(max(rows - 1, 0), np.int64)
    valid = np.arange(width) < unit_count[:, None]
    # One value for absent units, so that rows which end within a node stay beside the node's
    # others.
    padded = np.ascontiguousarray(np.where(valid, units, units.max(initial=0) + 1), np.int64)
    # Compared as bytes: one call instead of one sort a unit. Any order that keeps prefixes together
    # will do.
    order = np.argsort(padded.view(np.dtype((np.void, width * 8))).ravel(), kind="stable")
    same = padded[order[1:]] == padded[order[:-1]]
    shared = np.where(same.all(axis=1), width, same.argmin(axis=1))
    count = unit_count[order]
    return order, np.minimum(shared, np.minimum(count[1:], count[:-1]))


def _nodes(shared: Int64, rows: int) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """The last five fields of `Forest`: level by level, a node ends where two neighbours differ."""
    empty = np.zeros(0, np.int64)
    if not shared.any():
        return empty, empty, empty, empty, empty
    begin, end = np.zeros(1, np.int64), np.full(1, rows)
    # Of a root above the roots, which has no units.
    parent, at = (np.zeros(1, np.int64), np.zeros(1, np.int64))
    padded = np.append(shared, 0)
    levels = []
    total = depth = 0
    while True:
        neighbours = runs(begin, end - begin - 1)
        owner = np.repeat(np.arange(len(begin)), end - begin - 1)
        cut = neighbours[padded[neighbours] == at[owner]] + 1
        first, last = np.sort(np.append(begin, cut)), np.sort(np.append(end, cut))
        group = np.searchsorted(begin, first, side="right") - 1
        several = last - first > 1
        first, last, group = first[several], last[several], group[several]
        if not len(first):
            break
        until = np.minimum.reduceat(padded, np.stack([first, last - 1], axis=1).ravel())[::2]
        number = total + np.arange(len(first))
        levels.append(
            (parent[group] if depth else number, np.full(len(first), depth), first, last, until)
        )
        begin, end, at, parent = first, last, until, number
        total, depth = total + len(first), depth + 1
    parents, depths, firsts, lasts, ends = (
        np.concatenate(column) for column in zip(*levels, strict=True)
    )
    return parents, depths, firsts, lasts, ends
