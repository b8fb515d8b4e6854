"""Which shared prefixes are worth tasks of their own (PAT, pack: the profit model).

Packing a node saves reading its range once a row, and costs each row one more partial result. The
first packed node of a row costs two: the tail is then a partial result as well. A choice is made
per edge, from a node to a child node or to a row's own tail. Kept: the node's task serves the rows
below that edge. Dropped: the node's range is read again in front of the child's.

The rule `thrifty` takes the cheapest choice by `CostModel` among those that keep all or none of a
node's edges, so it never costs more than to drop or to keep all edges. Its work is proportional to
the sum of the nodes' depths. Where this saves less than a sixteenth of the batch's reads, all edges
are dropped. A prefix that all rows share makes parts of all heads of all rows, and such a plan
takes the host 1.4 times as long whenever the batch changes.

The lab has more, for comparison (`tangram_lab/baselines/packing_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import Bool, DecodeRows
from tangram.types import Float64, Int32, Int64

THRIFT = 1 / 16  # by the rule `thrifty`, packing must save this share of a batch's entries


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Entries per head, averaged over the full-attention layers.

    Costs are linear, so the average decides exactly. `end` [N]: where each node's range ends.
    `length` [R]: the length of the row at each position. Both are 0 if every layer has a sliding
    window, so that nothing can be shared.
    """

    end: Float64
    length: Float64

    @classmethod
    def of(
        cls, forest: Forest, lengths: Int32 | Int64, kept_tokens: Int32 | Int64, rows: DecodeRows
    ) -> Prefixes:
        """From `lengths` and `kept_tokens`, both [R, L, H]."""
        if rows.windowed.all():
            return cls(np.zeros(forest.nodes), np.zeros(len(forest.order)))
        full = ~rows.windowed if rows.windowed.any() else slice(None)  # a slice spares two copies
        kept, first = kept_tokens[:, full].mean(axis=(1, 2)), forest.first_row
        sealed = forest.sealed_units[first]
        end = np.minimum(forest.unit_end, sealed) * kept[first]
        end += np.maximum(forest.unit_end - sealed, 0) * rows.page_tokens
        return cls(end, lengths[:, full].mean(axis=(1, 2))[forest.order])


@dataclass(frozen=True, eq=False)
class Packing:
    """The choice: `edge` [N] and `tail` [R] say which edges are kept.

    `edge` is by node, for the edge above it. `tail` is by position, for the edge above the row's
    tail. `begin` [N]: the first unit of each node's range with the ranges put in front of it.
    `tail_begin` [R] is by row.
    """

    edge: Bool
    tail: Bool
    begin: Int64
    tail_begin: Int64

    @classmethod
    def of(cls, forest: Forest, edge: Bool, tail: Bool) -> Packing:
        """Where ranges begin, given the edges that are kept: `edge` [N] and `tail` [R]."""
        begin = np.zeros(forest.nodes, np.int64)
        for level in forest.levels[1:]:
            up = forest.parent[level]
            begin[level] = np.where(edge[level], forest.unit_end[up], begin[up])
        shares = forest.deepest < forest.nodes
        node = forest.deepest[shares]
        tail_begin = np.zeros(len(forest.order), np.int64)
        tail_begin[forest.order[shares]] = np.where(
            tail[shares], forest.unit_end[node], begin[node]
        )
        return cls(edge, tail & shares, begin, tail_begin)


# A rule: the forest, its prefixes, costs, G, and the most rows that a task serves.
PackingRule = Callable[[Forest, Prefixes, CostModel, int, int], Packing]


def pack_thrifty(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Packing:
    """The rule `thrifty`."""
    alone = choose_alone(forest, prefixes, cost, group, most_rows)
    if _measure_spared(forest, prefixes, alone, most_rows) < THRIFT:
        return pack_nothing(forest)
    return pack_nodes(forest, alone)


def pack_nothing(forest: Forest) -> Packing:
    """No edge is kept: every row reads all of its own entries."""
    return pack_nodes(forest, np.zeros(forest.nodes, np.bool_))


def pack_nodes(forest: Forest, alone: Bool) -> Packing:
    """Keep all edges of the nodes `alone` [N], which get tasks of their own."""
    alone = np.append(alone, False)
    return Packing.of(forest, alone[forest.parent], alone[forest.deepest])


def choose_alone(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Bool:
    """[N]: which nodes get tasks of their own.

    Computes, from the leaves up, the least cost for each place where a range may begin. A node at
    depth d has d + 1 such places: the start, and the end of each ancestor. Its range begins at the
    start exactly if no ancestor is packed. Packing it then makes a partial result of the tails as
    well.
    """
    starts = _starts(forest, prefixes)
    tails, tail_tokens = _tails(forest, prefixes)
    slope = float(cost.token_us(np.asarray(group)))
    best: Float64 = np.zeros((0, 0))
    below = slice(0, 0)
    separate = []
    for level, start in zip(reversed(forest.levels), reversed(starts), strict=True):
        end = prefixes.end[level, None]
        places = np.append(start, end, axis=1)  # where the range after the node may begin
        follows = (
            tails[level, None] * (cost.start_us - places * slope) + tail_tokens[level, None] * slope
        )
        if below.stop:
            np.add.at(follows, forest.parent[below] - level.start, best)
        packed = (
            _span_us(forest.rows[level, None], end - start, cost, group, most_rows)
            + follows[:, -1:]
        )
        partials = np.ones_like(start)
        partials[:, 0] = 2
        packed += forest.rows[level, None] * partials * cost.partial_us(group)
        separate.append(packed < follows[:, :-1])
        best, below = np.minimum(packed, follows[:, :-1]), level
    return _decide(forest, separate[::-1])


def _measure_spared(forest: Forest, prefixes: Prefixes, alone: Bool, most_rows: int) -> float:
    """The share of all entries that is not read if the nodes `alone` [N] have own tasks."""
    alone = np.append(alone, False)
    begin, end = np.zeros(forest.nodes + 1), np.append(prefixes.end, 0.0)
    for level in forest.levels[1:]:
        up = forest.parent[level]
        begin[level] = np.where(alone[up], end[up], begin[up])
    tasks = -(-np.append(forest.rows, 0) // most_rows)
    node = forest.deepest
    read = ((end - begin) * tasks * alone).sum() + (
        prefixes.length - np.where(alone, end, begin)[node]
    ).sum()
    return float(1 - read / max(prefixes.length.sum(), 1.0))


def _starts(forest: Forest, prefixes: Prefixes) -> list[Float64]:
    """Per level [n, depth + 1]: the entries before each place where a node's range may begin."""
    starts: list[Float64] = []
    for level in forest.levels:
        if not starts:
            starts.append(np.zeros((level.stop, 1)))
            continue
        up = forest.parent[level]
        above = starts[-1][up - forest.levels[len(starts) - 1].start]
        starts.append(np.append(above, prefixes.end[up, None], axis=1))
    return starts


def _tails(forest: Forest, prefixes: Prefixes) -> tuple[Float64, Float64]:
    """[N], [N]: number and summed lengths of the rows whose deepest node this is."""
    count, tokens = np.zeros((2, forest.nodes + 1))
    np.add.at(count, forest.deepest, 1.0)
    np.add.at(tokens, forest.deepest, prefixes.length)
    return count[:-1], tokens[:-1]


def _span_us(rows: Int64, tokens: Float64, cost: CostModel, group: int, most_rows: int) -> Float64:
    """`tokens` entries for `rows` rows, by tasks of up to `most_rows` rows each."""
    whole, rest = rows // most_rows, rows % most_rows
    full_us = cost.start_us + tokens * float(cost.token_us(np.asarray(most_rows * group)))
    return whole * full_us + (rest > 0) * (cost.start_us + tokens * cost.token_us(rest * group))


def _decide(forest: Forest, separate: list[Bool]) -> Bool:
    """From the roots down: follow the place where each node's range begins."""
    alone, place = np.zeros(forest.nodes, np.bool_), np.zeros(forest.nodes, np.int64)
    for depth, level in enumerate(forest.levels):
        if depth:
            up = forest.parent[level]
            place[level] = np.where(alone[up], depth, place[up])
        alone[level] = separate[depth][np.arange(level.stop - level.start), place[level]]
    return alone
