"""Shared by planners: from a number of parts per span of KV entries to a `WorkPlan`.

A *source* is a span of entries that some rows read in each layer, by every KV head: a row's own
entries, or a prefix that several rows share. A planner decides into how many parts each (layer,
source, head) is cut. Parts of a source, and sources of a row, are numbered in the order of their
entries, so that slots and merges follow from running sums.

Worked example: 3 sources, one KV head, one layer. Rows 0 and 1 read source 0 in 2 parts. Sources 1
and 2 are the rows' own tails in 1 part each. Row 0 has 3 parts in slots 0, 1, 2 (the last is its
tail), row 1 has slots 3, 4, 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tangram.errors import ConfigError
from tangram.plan.form import TILE_MULTIPLE, Bool, DecodeRows, RangeKind, WorkPlan
from tangram.types import Float64, Int64

FITTING_ROUNDS = 8
ORDER_STEPS = 65535  # sizes are ranked to 16 bits: NumPy sorts those by radix


@dataclass(frozen=True, eq=False)
class Sources:
    """S spans of entries and their readers.

    Span s is read by rows reader[indptr[s] : indptr[s + 1]], through the tables of `owner[s]`.
    Shapes: `owner` [S], `indptr` [S + 1], `reader` [E]. Every row reads at least one source. The
    sources of a row are listed in the order of their entries.
    """

    owner: Int64
    indptr: Int64
    reader: Int64

    @classmethod
    def own(cls, rows: int) -> Sources:
        """One source for each row, its own."""
        every = np.arange(rows)
        return cls(every, np.arange(rows + 1), every)

    @cached_property
    def readers(self) -> Int64:
        """[S]: how many rows read each source."""
        return np.diff(self.indptr)

    @cached_property
    def single(self) -> bool:
        """True if every row reads one source, its own."""
        return len(self.reader) == len(self.owner) and np.array_equal(
            self.reader, np.arange(len(self.reader))
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """The tasks of all layers in the order they start. Build it with `Parts.of`.

    `count` [L, S, H]: the parts of each cell. `cell` [N] is an index into `count`, and `number` [N]
    is the part within the cell. `last` are the tasks that read the last part of a cell.
    """

    count: Int64
    cell: Int64
    number: Int64
    last: Int64
    layer_indptr: Int64

    @classmethod
    def of(cls, count: Int64, size: npt.NDArray[np.float64 | np.int64]) -> Parts:
        """Cut each cell into `count` [L, S, H] parts of `size` [L, S, H] work; largest first."""
        layers, cells = count.shape[0], count.shape[1] * count.shape[2]
        order = longest_first(size.reshape(layers, cells))
        order += np.arange(layers)[:, None] * cells
        flat = order.ravel()
        copies = count.ravel().take(flat)
        end = np.cumsum(copies)
        number = np.arange(end[-1])
        number -= np.repeat(end - copies, copies)
        last = end - 1
        if not copies.all():
            last = last[copies > 0]
        return cls(
            count,
            np.repeat(flat, copies),
            number,
            last,
            np.append(0, end.reshape(layers, cells)[:, -1]),
        )

    def per_cell(self, values: Int64) -> Int64:
        """[N]: the value of each task's cell in `values`, which broadcasts to [L, S, H]."""
        return np.broadcast_to(values, self.count.shape).ravel().take(self.cell)


def longest_first(size: npt.NDArray[np.float64 | np.int64]) -> Int64:
    """[L, n]: per layer the order of `size` [L, n] from large to small.

    Ties (to 1 in 65,535) keep their own order.
    """
    largest = size.max(axis=1, initial=0, keepdims=True)
    scale = ORDER_STEPS / np.where(largest > 0, largest, 1)
    return np.asarray((ORDER_STEPS - size * scale).astype(np.uint16).argsort(axis=1, kind="stable"))


def fit_parts(
    size: Float64, target: Float64, wanted: Int64 | int, most: Float64 | float = np.inf
) -> Int64:
    """[L, …]: into how many parts of at most `target` [L, 1, 1] each cell of `size` is cut.

    `most` is the largest number. `wanted` is one for all layers, or [L, 1, 1]. Where no layer has
    more cells than that but one would get more parts, its target grows until they fit: one task too
    many would make all wait for it. With more cells, parts are rounded to the nearest number.
    """
    if size[0].size > np.min(wanted):
        return np.minimum(np.maximum(np.rint(size / target), 1), np.maximum(most, 1)).astype(
            np.int64
        )
    target = target.copy()
    for _ in range(FITTING_ROUNDS):
        count = np.minimum(np.ceil(size / target), most)
        excess = count.sum(axis=(1, 2), keepdims=True) / wanted
        if (excess <= 1).all():
            break
        target *= np.maximum(excess, 1)
    return count.astype(np.int64)


def require_positive(**values: int) -> None:
    """Raise `ConfigError` naming the first argument below 1.

    `tile_tokens` must also be a multiple of 16.
    """
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
        if name == "tile_tokens" and value % TILE_MULTIPLE:
            raise ConfigError(
                f"{name} is {value}, it must be a positive multiple of {TILE_MULTIPLE}"
            )


def split_evenly(rows: DecodeRows, parts: Int64, tile_tokens: int) -> WorkPlan:
    """Split every (row, layer, head) into `parts` [R, L, H] equal shares, except in window layers.

    Tasks of a layer start with the largest budget share, so that short tasks fill the gaps at the
    end.
    """
    require_positive(tile_tokens=tile_tokens)
    count = parts.swapaxes(0, 1).copy()
    count[rows.windowed] = 1
    tasks = Parts.of(count, rows.budget.swapaxes(0, 1) / count)
    split = count > 1
    kind = tasks.per_cell(np.where(split, int(RangeKind.FRAC), int(RangeKind.OPEN)))
    return finish(
        rows,
        Sources.own(len(parts)),
        tasks,
        kind,
        tasks.number,
        tasks.per_cell(count * split),
        tile_tokens,
    )


def finish(
    rows: DecodeRows,
    sources: Sources,
    tasks: Parts,
    kind: Int64,
    a: Int64,
    b: Int64,
    tile_tokens: int,
) -> WorkPlan:
    """The plan of tasks with ranges `kind`, `a`, `b` [N].

    In sliding-window layers WINDOW replaces these ranges.
    """
    layers, _, heads = tasks.count.shape
    a = _read_windows(rows, tasks, kind, a, b)
    slots = _Slots.of(sources, tasks.count, len(rows.table))
    address = [
        x if sources.single else x[sources.owner]
        for x in (rows.table, rows.length_index, rows.column)
    ]
    table, length_index, column = (tasks.per_cell(x.swapaxes(0, 1)) for x in address)
    row_indptr, reader, direct, slot = _entries(sources, tasks, slots)
    segment, width = np.flatnonzero(slots.split), slots.width
    merge_row, merge_head = (
        np.broadcast_to(x, slots.parts.shape).ravel().take(segment)
        for x in (np.arange(len(rows.table))[:, None], np.arange(heads))
    )
    numbers = np.arange(slots.per_layer.max())
    return WorkPlan(
        kv_heads=heads,
        tile_tokens=tile_tokens,
        layer_indptr=tasks.layer_indptr,
        table=table,
        length_index=length_index,
        column=column,
        head=tasks.per_cell(np.arange(heads)),
        kind=kind,
        a=a,
        b=b,
        row_begin=row_indptr[:-1],
        row_end=row_indptr[1:],
        rows=reader,
        direct=direct,
        slot=slot,
        merge_indptr=np.searchsorted(segment, np.arange(layers + 1) * width),
        merge_row=merge_row,
        merge_head=merge_head,
        part_indptr=np.append(0, np.cumsum(slots.parts.ravel().take(segment))),
        part_slot=np.concatenate([numbers[:count] for count in slots.per_layer]),
        partial_slots=len(numbers),
    )


def _read_windows(rows: DecodeRows, tasks: Parts, kind: Int64, a: Int64, b: Int64) -> Int64:
    """`a`, or a copy of it with the values of sliding-window layers.

    `kind` and `b` are changed in place.
    """
    if not rows.windowed.any():
        return a
    a = a.copy()
    for layer in np.flatnonzero(rows.windowed):
        inside = slice(tasks.layer_indptr[layer], tasks.layer_indptr[layer + 1])
        kind[inside], a[inside], b[inside] = int(RangeKind.WINDOW), rows.window_tokens[layer], 0
    return a


@dataclass(frozen=True, eq=False)
class _Slots:
    """Where parts write: `parts` [L, R, H] of each output; `split`, flat, marks several parts.

    `first` [L, E, H] is the slot of the first part that each reader has of its source, 0 where the
    output has only one part. `per_layer` [L] counts the slots of each layer.
    """

    parts: Int64
    split: Bool
    first: Int64
    per_layer: Int64

    @property
    def width(self) -> int:
        """Outputs of a layer, R · H."""
        return int(self.parts[0].size)

    @classmethod
    def of(cls, sources: Sources, count: Int64, rows: int) -> _Slots:
        """Number the partial results of each layer in the order (row, head, source, part)."""
        if sources.single:
            return cls._number(count)
        order = np.argsort(sources.reader, kind="stable")
        row = sources.reader[order]
        by_row = count.take(
            np.repeat(np.arange(len(sources.owner)), sources.readers)[order], axis=1
        )
        begin = np.searchsorted(row, np.arange(rows + 1))
        before = np.zeros((len(count), len(order) + 1, count.shape[2]), np.int64)
        np.cumsum(by_row, axis=1, out=before[:, 1:])
        outputs = cls._number(np.diff(before.take(begin, axis=1), axis=1))
        shift = outputs.first - before.take(begin[:-1], axis=1)
        first = (before[:, :-1] + shift.take(row, axis=1)).take(np.argsort(order), axis=1)
        return cls(outputs.parts, outputs.split, first, outputs.per_layer)

    @classmethod
    def _number(cls, parts: Int64) -> _Slots:
        split = parts > 1
        partial = (parts * split).reshape(len(parts), -1)
        end = np.cumsum(partial, axis=1)
        first = (end - partial).reshape(parts.shape) * split
        return cls(parts, split.ravel(), first, end[:, -1])


def _entries(sources: Sources, tasks: Parts, slots: _Slots) -> tuple[Int64, Int64, Bool, Int64]:
    """row_begin and row_end as one array [N + 1]; rows [M], direct [M] and slot [M]."""
    heads, every = tasks.count.shape[2], np.arange(len(sources.owner))[:, None]
    if sources.single:
        slot = slots.first.ravel().take(tasks.cell)
        slot += tasks.number
        indptr = np.arange(len(tasks.cell) + 1)
        return indptr, tasks.per_cell(every), ~slots.split.take(tasks.cell), slot
    # Per layer and head the readers of a source lie side by side: a task's entries are one run of
    # such an array.
    layers, readers = len(tasks.count), tasks.per_cell(sources.readers[:, None])
    base = np.arange(layers * heads).reshape(layers, 1, heads) * len(sources.reader)
    indptr = np.append(0, np.cumsum(readers))
    entry = np.arange(indptr[-1])
    entry += np.repeat(tasks.per_cell(base + sources.indptr[:-1, None]) - indptr[:-1], readers)
    direct = ~slots.split.reshape(slots.parts.shape).take(sources.reader, axis=1)
    row = np.tile(sources.reader, layers * heads).take(entry)
    slot = slots.first.swapaxes(1, 2).ravel().take(entry)
    slot += np.repeat(tasks.number, readers)
    return indptr, row, direct.swapaxes(1, 2).ravel().take(entry), slot
