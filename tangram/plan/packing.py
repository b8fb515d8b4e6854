"""Prefix packing: rows that share a prefix read it once, then every task is cut to size.

PAT (pack) and PersistentKV. Each packed node of the prefix forest becomes tasks that serve all of
its rows, per layer and KV head: ABS [boundary(first unit), boundary(last unit)). A node that does
not pay is not packed: its range is read in front of those of its children, in whose tables it is
contiguous anyway. The entries that a row does not share are its own tail, which ends OPEN.

Worked example: rows 0 and 1 share 2 sealed chunks of which a head keeps 512 entries each; they are
1500 and 1200 long:

    not packed      row 0 [0, len)   row 1 [0, len)
                    2700 entries read, no partial result
    packed          rows 0, 1 [0, 1024)   row 0 [1024, len)   row 1 [1024, len)
                    1676 entries read, 4 partial results

The rule packs: 1024 entries, some 120 ns, cost more than 4 partial results and a task, and are more
than a sixteenth of the reads.
"""

from __future__ import annotations

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import Bool, DecodeRows, WorkPlan
from tangram.plan.loops import bound_cells, gather_lengths
from tangram.plan.profit import PackingRule, Prefixes, pack_thrifty
from tangram.plan.split import Sources
from tangram.plan.workqueue import Grain, cut, plan_workqueue
from tangram.types import Int32, Int64

MAX_QUERY_ROWS = 64


def plan_packing(
    rows: DecodeRows,
    lengths: Int32,
    forest: Forest,
    kept_tokens: Int32 | Int64,
    grain: Grain,
    *,
    group: int,
    cost: CostModel,
    rule: PackingRule = pack_thrifty,
    max_query_rows: int = MAX_QUERY_ROWS,
) -> WorkPlan:
    """Pack the shared prefixes that pay by `rule` (see `plan/profit.py`).

    A task serves at most `max_query_rows` query heads of one KV head. `lengths` is the flat int32
    array. `kept_tokens` [L, H] (or [R, L, H], where rows have different profiles) is what each head
    keeps of a sealed chunk, and `group` is G. Sliding-window layers are never shared. Tasks are cut
    by `grain`. An entry that serves many rows counts by its cost in `cost`. Raises
    `ConfigError` naming the argument that is out of range.
    """
    if not 1 <= group <= max_query_rows:
        raise ConfigError(f"group is {group}, it must lie in 1 to max_query_rows, {max_query_rows}")
    if not forest.nodes or rows.windowed.all():
        return plan_workqueue(rows, lengths, grain)
    kept = np.ascontiguousarray(np.broadcast_to(kept_tokens, rows.shape), np.int64)
    prefixes = Prefixes.of(forest, lengths[rows.length_index], kept, rows)
    most_rows = max_query_rows // group
    packed = rule(forest, prefixes, cost, group, most_rows)
    node, sources = _pack(forest, packed.edge, packed.tail, most_rows)
    if not len(node):
        return plan_workqueue(rows, lengths, grain)
    shape = rows.shape[1], len(sources.owner), rows.shape[2]
    begin, end = (np.empty(shape, np.int32) for _ in range(2))
    first = np.concatenate([packed.begin[node], packed.tail_begin])
    for units, tokens in ((first, begin), (forest.unit_end[node], end)):
        bound_cells(units, sources.owner, forest.sealed_units, kept, rows.page_tokens, tokens)
    gather_lengths(rows.address, lengths, end)
    weight = cost.token_us(sources.counts * group) / cost.token_us(np.asarray(group))
    return cut(rows, sources, begin, end, weight, grain)


def _pack(forest: Forest, edge: Bool, tail: Bool, most_rows: int) -> tuple[Int64, Sources]:
    """The node of each shared source, and all sources.

    Packed nodes in runs of up to `most_rows` rows come first, then tails.
    """
    node, position = _find_served(forest, edge, tail)
    opens = np.ones(len(node), np.bool_)
    opens[1:] = node[1:] != node[:-1]
    starts = np.flatnonzero(opens)
    rank = np.arange(len(node)) - np.repeat(starts, np.diff(np.append(starts, len(node))))
    opens = rank % most_rows == 0
    begin = np.flatnonzero(opens)
    served, every = forest.order[position], np.arange(len(forest.order))
    indptr = np.concatenate([begin, len(node) + np.arange(len(every) + 1)])
    return node[begin], Sources(np.append(served[begin], every), indptr, np.append(served, every))


def _find_served(forest: Forest, edge: Bool, tail: Bool) -> tuple[Int64, Int64]:
    """Pairs (node, position), by node: the rows that read the node by a task of its own."""
    # By position: is the edge from the node of this level to the next one kept?
    below = tail.copy()
    pairs = []
    for level in reversed(forest.levels):
        position, node = forest.positions(level)
        kept = below[position]
        pairs.append((node[kept], position[kept]))
        below[position] = edge[node]
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    nodes, positions = zip(*reversed(pairs), strict=True)
    return np.concatenate(nodes), np.concatenate(positions)
