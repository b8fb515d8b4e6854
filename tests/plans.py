"""Plans put together from tasks in any order and of any kind, which no planner makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.form import TILE_MULTIPLE, Bool, WorkPlan
from tangram.plan.records import ENTRY, SEGMENT, TASK, Records
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
    entries = gather_records(ENTRY, (rows, out.direct, out.slot, np.zeros_like(rows)))
    ranges = (x[order] for x in (tasks.table, tasks.length_index, tasks.column))
    fields = *ranges, head, kind, a, tasks.b[order], row_end - count, row_end
    records = gather_records(TASK, (*fields, entries[row_end - count]))
    return WorkPlan(
        kv_heads=kv_heads,
        tile_tokens=tile_tokens,
        layer_indptr=_indptr(layer, layers),
        tasks=records,
        entries=entries,
        merge_indptr=out.merge_indptr,
        segments=out.segments,
        partial_slots=out.partial_slots,
    )


def gather_records(record: np.dtype[np.void], fields: Sequence[np.ndarray]) -> Records:
    """Records of which the fields are given in their order."""
    gathered = np.empty(len(fields[0]), record)
    for name, values in zip(record.names or (), fields, strict=True):
        gathered[name] = values
    return gathered


def _indptr(layer: Int64, layers: int) -> Int64:
    """[L + 1]: where each layer begins in the sorted array `layer`."""
    return np.searchsorted(layer, np.arange(layers + 1)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Outputs:
    """Where the row-list entries write and how their parts are merged: fields of `WorkPlan`."""

    direct: Bool
    slot: Int64
    merge_indptr: Int64
    segments: Records
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
    merged, parts = cells[starts[sizes > 1]], sizes[sizes > 1]
    first = part_slot[np.cumsum(parts) - parts]
    segments = gather_records(SEGMENT, (merged[:, 1], merged[:, 2], first, first + parts))
    return _Outputs(
        direct, slot, _indptr(merged[:, 0], layers), segments, int(layer_slots.max(initial=0))
    )


def change_plan(
    plan: WorkPlan, field: str, values: Int64 | int, index: int | None = None
) -> WorkPlan:
    """`plan` with `values` in `field`, as "tasks.kind", everywhere or at `index`. Tasks still
    repeat their entries, where they have some.
    """
    array, _, word = field.partition(".")
    changed = {name: getattr(plan, name).copy() for name in {array, "tasks"}}
    target = changed[array][word] if word else changed[array]
    target[slice(None) if index is None else index] = values
    if array == "entries":
        changed["tasks"]["first"] = changed["entries"][changed["tasks"]["row_begin"]]
    return replace(plan, **changed)
