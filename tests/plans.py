"""Plans put together from tasks in any order and of any kind, which no planner makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.form import TILE_MULTIPLE, Bool, WorkPlan
from tangram.types import Int64


@dataclass(frozen=True, eq=False)
class TaskList:
    """A planner's raw answer, one entry a task [N], each serving the next `row_count` entries of
    `rows` [M].
    """

    layer: Int64
    table: Int64
    length_index: Int64
    column: Int64
    head: Int64
    kind: Int64
    a: Int64
    b: Int64
    row_count: Int64
    rows: Int64


def assemble(tasks: TaskList, layers: int, kv_heads: int, tile_tokens: int) -> WorkPlan:
    """Group tasks by layer (keeping their order within one), number the partial results and lay out
    the merges.

    Takes tasks in any order and of any kind; planners, whose parts come in order, use the cheaper
    `split.finish`.

    Raises `ConfigError` if `tile_tokens` is not a multiple of 16.
    """
    if tile_tokens < 1 or tile_tokens % TILE_MULTIPLE:
        raise ConfigError(
            f"tile_tokens is {tile_tokens}, it must be a positive multiple of {TILE_MULTIPLE}"
        )
    order = np.argsort(tasks.layer, kind="stable")
    count = tasks.row_count[order]
    row_end = np.cumsum(count)
    first_entry = (np.cumsum(tasks.row_count) - tasks.row_count)[order]
    within = np.arange(len(tasks.rows)) - np.repeat(row_end - count, count)
    rows = tasks.rows[np.repeat(first_entry, count) + within]
    layer, head, kind, a = (x[order] for x in (tasks.layer, tasks.head, tasks.kind, tasks.a))
    task = np.repeat(np.arange(len(order)), count)
    out = _outputs(layer[task], rows, head[task], kind[task], a[task], layers)
    return WorkPlan(
        kv_heads=kv_heads,
        tile_tokens=tile_tokens,
        layer_indptr=_indptr(layer, layers),
        table=tasks.table[order],
        length_index=tasks.length_index[order],
        column=tasks.column[order],
        head=head,
        kind=kind,
        a=a,
        b=tasks.b[order],
        row_begin=row_end - count,
        row_end=row_end,
        rows=rows,
        direct=out.direct,
        slot=out.slot,
        merge_indptr=out.merge_indptr,
        merge_row=out.merge_row,
        merge_head=out.merge_head,
        part_indptr=out.part_indptr,
        part_slot=out.part_slot,
        partial_slots=out.partial_slots,
    )


def _indptr(layer: Int64, layers: int) -> Int64:
    """[L + 1]: where each layer begins in the sorted array `layer`."""
    return np.searchsorted(layer, np.arange(layers + 1)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Outputs:
    """Where the row-list entries write and how their parts are merged: the last eight fields of
    `WorkPlan`.
    """

    direct: Bool
    slot: Int64
    merge_indptr: Int64
    merge_row: Int64
    merge_head: Int64
    part_indptr: Int64
    part_slot: Int64
    partial_slots: int


def _outputs(layer: Int64, row: Int64, head: Int64, kind: Int64, a: Int64, layers: int) -> _Outputs:
    """Outputs for M entries; the parts of one (layer, row, head) are merged in the order of range
    kind, then of `a`.
    """
    order = np.lexsort((a, kind, head, row, layer))
    cells = np.stack([layer, row, head], axis=1)[order]
    opens = np.ones(len(cells), np.bool_)
    opens[1:] = (cells[1:] != cells[:-1]).any(axis=1)
    starts = np.flatnonzero(opens)
    sizes = np.diff(np.append(starts, len(cells)))
    partial = np.repeat(sizes > 1, sizes)
    layer_slots = np.bincount(cells[partial, 0], minlength=layers)
    part_slot = np.arange(int(partial.sum())) - np.repeat(
        np.cumsum(layer_slots) - layer_slots, layer_slots
    )
    direct, slot = np.empty(len(cells), np.bool_), np.zeros(len(cells), np.int64)
    direct[order] = ~partial
    slot[order[partial]] = part_slot
    merged = cells[starts[sizes > 1]]
    return _Outputs(
        direct,
        slot,
        _indptr(merged[:, 0], layers),
        merged[:, 1],
        merged[:, 2],
        np.append(0, np.cumsum(sizes[sizes > 1])),
        part_slot,
        int(layer_slots.max(initial=0)),
    )
