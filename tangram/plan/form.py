"""The form of every decode schedule: which task reads which KV entries for which query rows.

It also says how partial results are merged. Planners produce a `WorkPlan`; kernels execute it. The
KV range of a task is *logical*, so a plan stays valid while lengths grow (PersistentKV: split
bounds come from each row's own length):

    ABS     [a, b)                        an immutable span, which rows may share (PAT, pack)
    OPEN    [a, length)                   a growing tail
    FRAC    share a of b equal shares of [0, length) in whole tiles, worked out at execution
            (Tangram, AOT load balancing); EMPTY for some shares while there are fewer tiles
    WINDOW  [max(0, length - a), length)  a sliding window of a tokens

Worked example: 1 layer, 2 rows, 1 KV head, row 0 split in two, row 1 whole, tile 64:

    task        kind  a  b   rows[row_begin:row_end]   direct  slot
    0           FRAC  0  2   [0]                       no      0
    1           FRAC  1  2   [0]                       no      1
    2           OPEN  0  0   [1]                       yes     -
    segment 0: row 0, head 0, parts [0, 1]

At length 200 (4 tiles) task 0 reads [0, 128) and task 1 [128, 200). At length 50 (1 tile) task 0 is
EMPTY and task 1 reads [0, 50).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tangram.errors import ConfigError
from tangram.types import Float64, Int32, Int64

Bool = npt.NDArray[np.bool_]

TILE_MULTIPLE = 16


class RangeKind(IntEnum):
    """The kind of a task's range `a`, `b`; see the module's docstring."""

    ABS = 0
    OPEN = 1
    FRAC = 2
    WINDOW = 3


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The input of a planner: R rows that decode one token each. Arrays are [R, L, H].

    `table` is the offset, in the flat block tables, of the first page entry of the (row, layer, KV
    head). `column` is the head's column in its group's pages. `length_index` points into the flat
    lengths array, whose values are rewritten at every step. `budget` is the number of entries that
    each is expected to hold while the plan is used. `windows` gives each layer's sliding window in
    tokens, None = full; entry i of a window layer's table holds position i.
    """

    table: Int64
    column: Int64
    length_index: Int64
    budget: Float64
    windows: tuple[int | None, ...]
    page_tokens: int

    def __post_init__(self) -> None:
        shape = self.table.shape
        if len(shape) != 3 or any(
            x.shape != shape for x in (self.column, self.length_index, self.budget)
        ):
            raise ConfigError(
                "table, column, length_index and budget must all be [R, L, H], table is "
                f"{list(shape)}"
            )
        if not self.table.size:
            raise ConfigError(
                f"table is {list(shape)}, it must have at least one row, layer and head"
            )
        if len(self.windows) != shape[1]:
            raise ConfigError(
                f"windows has {len(self.windows)} entries, it must have one a layer, {shape[1]}"
            )

    def layer(self, layer: int) -> DecodeRows:
        """The same rows in one layer alone, [R, 1, H], for planning layer by layer."""
        one = slice(layer, layer + 1)
        return DecodeRows(
            self.table[:, one],
            self.column[:, one],
            self.length_index[:, one],
            self.budget[:, one],
            self.windows[one],
            self.page_tokens,
        )

    @cached_property
    def window_tokens(self) -> Int64:
        """[L]: the sliding window of each layer, 0 where the layer is full (see `windowed`)."""
        return np.asarray([window or 0 for window in self.windows], np.int64)

    @cached_property
    def windowed(self) -> Bool:
        """[L]: which layers have a sliding window."""
        return np.asarray([window is not None for window in self.windows], np.bool_)


@dataclass(frozen=True, eq=False)
class WorkPlan:
    """The tasks of all layers, in the order they should start, and how their results are merged.

    Layer l owns tasks [layer_indptr[l], layer_indptr[l+1]) and segments [merge_indptr[l],
    merge_indptr[l+1]). Per task [N]: `table`, `column`, `length_index` (as in `DecodeRows`, of the
    first row served), `head` (KV head), `kind`, `a`, `b` (range), `row_begin`, `row_end` into the
    row list. Runs of the row list follow the order of tasks.

    Per entry of the row list [M]: `rows` (query row), `direct`, `slot`. A `direct` entry is the
    row's only part, and its task writes the output. Otherwise `slot` is the place of the partial
    result, counted from 0 in each layer.

    Per merge segment [S]: `merge_row`, `merge_head` and the slots part_slot[part_indptr[s] :
    part_indptr[s+1]]. These are merged in that order, so that equal plans give equal bits. Slots
    are numbered in the order of the merges. `partial_slots` is the most slots that any layer uses.
    A slot holds the G query heads of one row and KV head. `kv_heads` is H.
    """

    kv_heads: int
    tile_tokens: int
    layer_indptr: Int64
    table: Int64
    length_index: Int64
    column: Int64
    head: Int64
    kind: Int64
    a: Int64
    b: Int64
    row_begin: Int64
    row_end: Int64
    rows: Int64
    direct: Bool
    slot: Int64
    merge_indptr: Int64
    merge_row: Int64
    merge_head: Int64
    part_indptr: Int64
    part_slot: Int64
    partial_slots: int

    @property
    def layers(self) -> int:
        """L."""
        return len(self.layer_indptr) - 1

    @property
    def task_layer(self) -> Int64:
        """[N]: the layer of each task."""
        return np.repeat(np.arange(self.layers, dtype=np.int64), np.diff(self.layer_indptr))

    def tasks(self, layer: int) -> slice:
        """The tasks of one layer."""
        return slice(int(self.layer_indptr[layer]), int(self.layer_indptr[layer + 1]))

    def segments(self, layer: int) -> slice:
        """The merge segments of one layer."""
        return slice(int(self.merge_indptr[layer]), int(self.merge_indptr[layer + 1]))

    def spans(self, lengths: Int32, tasks: slice = slice(None)) -> tuple[Int64, Int64]:
        """[N], [N]: begin and end of the ranges of `tasks` at `lengths`, equal where EMPTY."""
        length = lengths[self.length_index[tasks]]
        return resolve(self.kind[tasks], self.a[tasks], self.b[tasks], length, self.tile_tokens)

    def check(self, rows: DecodeRows, lengths: Int32, tables: Int32 | None = None) -> None:
        """Raise `IntegrityError` unless each visible entry of each (row, layer, head) is read once.

        The check is at `lengths`, flat. Parts and merge segments must agree, too. Where a task
        serves several rows whose page entries lie at different offsets, `tables` (the flat block
        tables) must show that they name the same pages.
        """
        from tangram.plan.check import check_plan

        check_plan(self, rows, lengths, tables)


def resolve(
    kind: Int64, a: Int64, b: Int64, length: npt.NDArray[np.integer], tile: int
) -> tuple[Int64, Int64]:
    """[N], [N]: begin and end of ranges; the specification for every kernel.

    FRAC divides ceil(length / tile) tiles into b shares, as evenly as whole tiles allow. The last
    tile may be partial.
    """
    length = np.asarray(length, np.int64)
    tiles, shares = -(-length // tile), np.maximum(b, 1)
    choices = [kind == member for member in RangeKind]
    begin = np.select(
        choices, [a, np.minimum(a, length), a * tiles // shares * tile, np.maximum(length - a, 0)]
    )
    end = np.select(
        choices, [b, length, np.minimum((a + 1) * tiles // shares * tile, length), length]
    )
    return begin, end
