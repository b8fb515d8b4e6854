"""Baselines of the packing rules: nothing, everything, as PAT's paper does, and all that pays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tangram.plan import profit
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.profit import Packing, PackingRule, Prefixes, pack_thrifty


def pack_nothing(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Packing:
    """Drop all edges."""
    return profit.pack_nothing(forest)


def pack_everything(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Packing:
    """Keep all edges."""
    edge, tail = np.ones(forest.nodes, np.bool_), np.ones(len(forest.order), np.bool_)
    return Packing.of(forest, edge, tail)


def pack_measured(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Packing:
    """As the rule `thrifty` does, however little of the batch's reads that saves."""
    return profit.pack_nodes(forest, profit.choose_alone(forest, prefixes, cost, group, most_rows))


def pack_by_paper(
    forest: Forest, prefixes: Prefixes, cost: CostModel, group: int, most_rows: int
) -> Packing:
    """Drop the edge from node u to child i where 4 · s_i > l_u (PAT).

    s_i are the rows below the child, l_u the entries of u and of the ranges put in front of it. The
    rule counts one intermediate result a row, while G query heads make G of them. With float32
    partials and 16-bit K and V the break-even is nearer to 2 · G · s_i > l_u.
    """
    edge, begin = np.zeros(forest.nodes, np.bool_), np.zeros(forest.nodes)
    for level in forest.levels[1:]:  # from the roots down
        up = forest.parent[level]
        edge[level] = 4 * forest.rows[level] <= prefixes.end[up] - begin[up]
        begin[level] = np.where(edge[level], prefixes.end[up], begin[up])
    span = np.append(prefixes.end - begin, 0.0)
    return Packing.of(forest, edge, span[forest.deepest] >= 4)


ALL_PACKING_RULES: Mapping[str, PackingRule] = {
    "thrifty": pack_thrifty,
    "measured": pack_measured,
    "paper": pack_by_paper,
    "naive": pack_everything,
    "off": pack_nothing,
}
