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
from tangram.plan.form import TILE_MULTIPLE, DecodeRows, WorkPlan
from tangram.plan.loops import Ranges, Readers, fit_layers, lay_out
from tangram.types import Float64, Int32, Int64


@dataclass(frozen=True, eq=False)
class Sources:
    """S spans of entries and their readers.

    Span s is read by rows reader[indptr[s] : indptr[s + 1]], through the tables of `owner[s]`.
    Shapes: `owner` [S], `indptr` [S + 1], `reader` [E]. The last R sources are the rows' own, in
    their order. The sources of a row are listed in the order of their entries.
    """

    owner: Int64
    indptr: Int64
    reader: Int64

    @classmethod
    def by_row(cls, rows: int) -> Sources:
        """One source for each row, its own."""
        every = np.arange(rows)
        return cls(every, np.arange(rows + 1), every)

    @cached_property
    def counts(self) -> Int64:
        """[S]: how many rows read each source."""
        return np.diff(self.indptr)

    @property
    def readers(self) -> Readers:
        """For compiled loops."""
        if self.reader[-1] + 1 == len(self.owner):  # every row reads its own source alone
            every, indptr = self.owner.astype(np.uint32), self.indptr.astype(np.uint32)
            return Readers(every, indptr, every, indptr, every, every)
        entry = np.argsort(self.reader, kind="stable")
        source = np.repeat(np.arange(len(self.owner)), self.counts)[entry]
        row_indptr = np.append(0, np.cumsum(np.bincount(self.reader)))
        fields = self.owner, self.indptr, self.reader, row_indptr, source, entry
        return Readers(*(field.astype(np.uint32) for field in fields))


def fit_parts(
    size: npt.NDArray[np.float64 | np.int32],
    target: Float64,
    wanted: int,
    most: Float64 | float = np.inf,
) -> Int32:
    """[L, …]: into how many parts of at most `target` [L, 1, 1] each cell of `size` is cut.

    `most` is the largest number. Where a layer has no more cells than `wanted` but would get more
    parts, its target grows until they fit: one task too many would make all wait for it. With more
    cells, parts are rounded to the nearest number.
    """
    layers = len(size)
    flat = np.ascontiguousarray(size, np.float64).reshape(layers, -1)
    limit = np.broadcast_to(most, size.shape).astype(np.float64, order="C")
    targets = np.ascontiguousarray(target, np.float64).reshape(layers)
    count = np.empty(flat.shape, np.int32)
    fit_layers(flat, limit.reshape(flat.shape), targets, wanted, count)
    return count.reshape(size.shape)


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


def split_evenly(
    rows: DecodeRows,
    parts: npt.NDArray[np.integer],
    tile_tokens: int,
    size: npt.NDArray[np.integer] | None = None,
) -> WorkPlan:
    """Split every (row, layer, head) into `parts` [R, L, H] equal shares, except in window layers.

    Tasks of a layer start with the largest share of `size` [R, L, H], the budget by default, so
    that short tasks fill the gaps at the end.
    """
    require_positive(tile_tokens=tile_tokens)
    count = np.array(parts.swapaxes(0, 1), np.int32, order="C")
    count[rows.windowed] = 1
    work = (rows.budget if size is None else size).swapaxes(0, 1) / count
    sources = Sources.by_row(len(parts))
    return finish(rows, sources, count, np.ascontiguousarray(work), None, tile_tokens)


def plan_plain(rows: DecodeRows) -> WorkPlan:
    """The planner that does not split, with which every other is compared: no partial results.

    Worked example: 2 rows, 1 full layer, 2 KV heads give 4 tasks `OPEN [0, length)`. In a layer
    with a window of 128 tokens the same tasks read `WINDOW 128`.
    """
    return split_evenly(rows, np.ones(rows.shape, np.int64), TILE_MULTIPLE)


def finish(
    rows: DecodeRows,
    sources: Sources,
    count: Int32,
    size: Float64,
    ranges: tuple[Int32, Int32] | None,
    tile_tokens: int,
) -> WorkPlan:
    """The plan of cells that are cut into `count` [L, S, H] parts of `size` [L, S, H] work each.

    `ranges` are the begins and ends of all cells, [L, S, H], of which the last R sources end OPEN.
    Without them parts are FRAC shares. In sliding-window layers WINDOW replaces these ranges. In
    each layer large parts come first. Those that differ by less than 1 in 65,535 of the largest
    keep their own order.
    """
    begin, end = (np.zeros_like(count), count) if ranges is None else ranges
    shared, tile = len(sources.owner) - rows.shape[0], 0 if ranges is None else tile_tokens
    window = np.where(rows.windowed, rows.window_tokens, -1)
    layer_indptr, tasks, entries, merge_indptr, segments, slots = lay_out(
        count, size, Ranges(begin, end, shared, tile), sources.readers, rows.address, window
    )
    return WorkPlan(
        rows.shape[2], tile_tokens, layer_indptr, tasks, entries, merge_indptr, segments, int(slots)
    )
