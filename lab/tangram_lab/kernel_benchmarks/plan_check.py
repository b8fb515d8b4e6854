"""The integrity check of work plans: each visible KV entry of a (row, layer, head) is read once."""

from __future__ import annotations

import numpy as np

from tangram.errors import IntegrityError
from tangram.plan.form import Bool, DecodeRows, WorkPlan
from tangram.plan.records import RangeKind
from tangram.types import Int32, Int64


def check_plan(
    plan: WorkPlan, rows: DecodeRows, lengths: Int32, tables: Int32 | None = None
) -> None:
    """Raise `IntegrityError` unless each visible entry of each (row, layer, head) is read once.

    The check is at `lengths`, flat. Parts and merge segments must agree, too. Where a task serves
    several rows whose page entries lie at different offsets, `tables` (the flat block tables) must
    show that they name the same pages.
    """
    _check_structure(plan, rows, len(lengths))
    task = np.repeat(np.arange(len(plan.tasks)), plan.rows_served)
    where = plan.entries["row"], plan.task_layer[task], plan.tasks["head"][task]
    begin, end = plan.spans(lengths)
    _check_sources(plan, rows, task, where, begin[task], end[task], tables)
    cell = np.ravel_multi_index(where, rows.shape)
    _check_coverage(plan, rows, lengths, cell, begin[task], end[task])
    _check_outputs(plan, rows, cell, where[1])


def _demand(
    good: Bool, message: str, cell: Int64 | None = None, shape: tuple[int, ...] = ()
) -> None:
    """Raise unless all of `good`; `cell` [same length] names the wrong (row, layer, head)."""
    if good.all():
        return
    where = "" if cell is None else f" at (row, layer, head) {_names(cell[~good][0], shape)}"
    raise IntegrityError(f"work plan: {message}{where}; {int((~good).sum())} in all")


def _names(cell: np.int64, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(x) for x in np.unravel_index(cell, shape))


def _check_structure(plan: WorkPlan, rows: DecodeRows, lengths: int) -> None:
    """Records are well formed and within bounds, so that the other checks may use them."""
    count, layers, heads = rows.shape
    tasks, entries, segments = plan.tasks, plan.entries, plan.segments
    n, m, s = len(tasks), len(entries), len(segments)
    runs = np.append(tasks["row_begin"], m)
    for name, indptr, size, parts in (
        ("layer_indptr", plan.layer_indptr, n, layers),
        ("merge_indptr", plan.merge_indptr, s, layers),
        ("row_begin and row_end", runs, m, n),
    ):
        good = (
            len(indptr) == parts + 1
            and indptr[0] == 0
            and indptr[-1] == size
            and (np.diff(indptr) >= 0).all()
        )
        _demand(np.array([good]), f"{name} does not divide {size} entries into {parts} runs")
    _demand(tasks["row_end"] == runs[1:], "row_begin and row_end leave gaps")
    for name, values, limit in (
        ("row", entries["row"], count),
        ("head", tasks["head"], heads),
        ("kind", tasks["kind"], len(RangeKind)),
        ("length_index", tasks["length_index"], lengths),
        ("row of a segment", segments["row"], count),
        ("head of a segment", segments["head"], heads),
        ("first_slot", segments["first_slot"], plan.partial_slots),
        ("end_slot", segments["end_slot"], plan.partial_slots + 1),
        ("slot", entries["slot"][~plan.direct], plan.partial_slots),
    ):
        _demand(
            (values >= 0) & (values < limit), f"{name} is out of range, it must lie in [0, {limit})"
        )
    _demand((tasks["kind"] != RangeKind.FRAC) | (tasks["b"] > 0), "a share is one of no shares")
    _demand(segments["first_slot"] < segments["end_slot"], "a segment has no slots")
    repeated = tasks["first"] == entries[tasks["row_begin"] % max(m, 1)]
    _demand((plan.rows_served > 0) & repeated, "a task does not repeat its first entry")


def _check_sources(
    plan: WorkPlan,
    rows: DecodeRows,
    task: Int64,
    where: tuple[Int32, Int64, Int32],
    begin: Int64,
    end: Int64,
    tables: Int32 | None,
) -> None:
    """Every task reads pages, column and length of the rows it serves.

    Only immutable spans serve several rows.
    """
    cell, shape = np.ravel_multi_index(where, rows.shape), rows.shape
    own = plan.tasks[task]
    _demand(rows.column[where] == own["column"], "wrong column", cell, shape)
    _demand(
        (own["kind"] == RangeKind.ABS) | (rows.length_index[where] == own["length_index"]),
        "wrong length_index",
        cell,
        shape,
    )
    moved = np.flatnonzero(rows.table[where] != own["table"])
    if not len(moved):
        return
    _demand(
        np.array([tables is not None]), "a task serves rows with other page entries: pass tables"
    )
    if tables is None:
        return
    first, last = begin[moved] // rows.page_tokens, -(-end[moved] // rows.page_tokens)
    pages = np.maximum(last - first, 0)
    step = (
        np.arange(pages.sum())
        - np.repeat(np.cumsum(pages) - pages, pages)
        + np.repeat(first, pages)
    )
    ours, theirs = (np.repeat(x[moved], pages) + step for x in (own["table"], rows.table[where]))
    bounded = (np.maximum(ours, theirs) < len(tables)) & (np.minimum(ours, theirs) >= 0)
    _demand(bounded, "page entries lie outside the tables", np.repeat(cell[moved], pages), shape)
    _demand(
        tables[ours] == tables[theirs],
        "a task reads another row's pages",
        np.repeat(cell[moved], pages),
        shape,
    )


def _check_coverage(
    plan: WorkPlan, rows: DecodeRows, lengths: Int32, cell: Int64, begin: Int64, end: Int64
) -> None:
    """Check that the ranges of each cell cover its visible entries without gap or overlap.

    The non-empty ranges run from the first visible entry to the cell's length.
    """
    shape = rows.shape
    length = lengths[rows.length_index].astype(np.int64)
    window = np.where(rows.windowed, rows.window_tokens, np.iinfo(np.int64).max)
    start = np.maximum(length - window[None, :, None], 0).ravel()
    _demand(begin <= end, "a range ends before it begins", cell, shape)
    some = begin < end
    order = np.lexsort((begin[some], cell[some]))
    cell, begin, end = cell[some][order], begin[some][order], end[some][order]
    opens = np.ones(len(cell), np.bool_)
    opens[1:] = cell[1:] != cell[:-1]
    previous = np.where(opens, start[cell], np.roll(end, 1))
    _demand(
        begin >= previous, "entries are read twice, or before the first visible one", cell, shape
    )
    _demand(begin <= previous, "entries are skipped", cell, shape)
    reached = start.copy()
    reached[cell] = end  # the last range of a cell wins: assignment runs in order
    _demand(
        reached == length.ravel(), "ranges do not end at the length", np.arange(len(reached)), shape
    )


def _check_outputs(plan: WorkPlan, rows: DecodeRows, cell: Int64, layer: Int64) -> None:
    """Each cell has one direct part, or a merge segment with the slots of all its parts.

    Each slot is listed exactly once.
    """
    shape, size = rows.shape, rows.table.size
    direct = np.bincount(cell[plan.direct], minlength=size)
    partial = np.bincount(cell[~plan.direct], minlength=size)
    segment_layer = np.repeat(np.arange(plan.layers), np.diff(plan.merge_indptr))
    merged = plan.segments
    segment = np.ravel_multi_index((merged["row"], segment_layer, merged["head"]), shape)
    segments = np.bincount(segment, minlength=size)
    every = np.arange(size)
    _demand(direct + segments == 1, "not exactly one writer of the output", every, shape)
    _demand(
        (partial > 0) == (segments > 0),
        "parts without a merge, or a merge without parts",
        every,
        shape,
    )
    first, parts = merged["first_slot"], merged["end_slot"] - merged["first_slot"]
    before = np.cumsum(parts) - parts
    opens = plan.merge_indptr[segment_layer]
    _demand(
        first == before - before[opens],
        "slots do not follow the order of the merges",
        segment,
        shape,
    )
    part_segment = np.repeat(np.arange(len(segment)), parts)
    slot = np.arange(len(part_segment)) - np.repeat(before - first, parts)
    listed = np.stack([segment_layer[part_segment], slot, segment[part_segment]], axis=1)
    written = np.stack([layer, plan.entries["slot"], cell], axis=1)[~plan.direct]
    unique = len(np.unique(written[:, :2], axis=0)) == len(written)
    _demand(np.array([unique]), "two parts of a layer write one slot")
    same = len(listed) == len(written) and (_sort(listed) == _sort(written)).all()
    _demand(np.array([same]), "merge segments do not list the slots that their parts write")


def _sort(table: Int64) -> Int64:
    return table[np.lexsort(table.T)]
