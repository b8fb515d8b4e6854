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
from tangram.types import Int32, Int64

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
    """The input of a planner: R rows that decode one token each.

    `address` [L, R, H, 3], int32, has three numbers of each (layer, row, KV head), as kernels read
    them. `table` is the offset of its first page entry in the flat block tables. `column` is the
    head's column in its group's pages. `length_index` points into the flat lengths array, whose
    values are rewritten at every step. `budget` [R, L, H] is the number of entries that each is
    expected to hold while the plan is used. `windows` gives each layer's sliding window in tokens,
    None = full; entry i of a window layer's table holds position i.
    """

    address: Int32
    budget: npt.NDArray[np.float64 | np.int32]
    windows: tuple[int | None, ...]
    page_tokens: int

    def __post_init__(self) -> None:
        layers, rows, heads, _ = self.address.shape
        if self.budget.shape != (rows, layers, heads):
            raise ConfigError(
                f"budget is {list(self.budget.shape)}, it must be [R, L, H], "
                f"{[rows, layers, heads]}"
            )
        if not self.address.size:
            raise ConfigError(
                f"there are {[rows, layers, heads]} rows, layers and heads, there must be at least "
                "one row, layer and head"
            )
        if len(self.windows) != layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries, it must have one a layer, {layers}"
            )

    @classmethod
    def of(
        cls,
        table: npt.NDArray[np.integer],
        column: npt.NDArray[np.integer],
        length_index: npt.NDArray[np.integer],
        budget: npt.NDArray[np.float64 | np.int32],
        windows: tuple[int | None, ...],
        page_tokens: int,
    ) -> DecodeRows:
        """From the parts of `address`, each [R, L, H]."""
        address = np.stack([table, column, length_index], axis=-1).swapaxes(0, 1)
        return cls(np.ascontiguousarray(address, np.int32), budget, windows, page_tokens)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, L, H)."""
        layers, rows, heads, _ = self.address.shape
        return rows, layers, heads

    @property
    def table(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return self.address[..., 0].swapaxes(0, 1)

    @property
    def column(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return self.address[..., 1].swapaxes(0, 1)

    @property
    def length_index(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return self.address[..., 2].swapaxes(0, 1)

    def layer(self, layer: int) -> DecodeRows:
        """The same rows in one layer alone, [R, 1, H], for planning layer by layer."""
        one = slice(layer, layer + 1)
        return DecodeRows(
            self.address[one], self.budget[:, one], self.windows[one], self.page_tokens
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
    merge_indptr[l+1]). All records are int32, as kernels read them:

    `tasks` [N, 13]: `table`, `length_index`, `column` (as in `DecodeRows`, of the first row
    served), `head` (KV head), `kind`, `a`, `b` (range), `row_begin`, `row_end` into the row list.
    The last four repeat its first entry. Runs of the row list follow the order of tasks.

    `entries` [M, 4] of the row list: `rows` (query row), `direct`, `slot`, 0. A `direct` entry is
    the row's only part, and its task writes the output. Otherwise `slot` is the place of the
    partial result, counted from 0 in each layer.

    `segments` [S, 4]: `merge_row`, `merge_head`, and the slots that are merged, from the first to
    before the last. Slots are merged in that order, so that equal plans give equal bits. They are
    numbered in the order of the merges. `partial_slots` is the most slots that any layer uses. A
    slot holds the G query heads of one row and KV head. `kv_heads` is H.
    """

    kv_heads: int
    tile_tokens: int
    layer_indptr: Int64
    tasks: Int32
    entries: Int32
    merge_indptr: Int64
    segments: Int32
    partial_slots: int

    @property
    def layers(self) -> int:
        """L."""
        return len(self.layer_indptr) - 1

    @property
    def table(self) -> Int32:
        """[N]: offset of the page entries; a view."""
        return self.tasks[:, 0]

    @property
    def length_index(self) -> Int32:
        """[N]: place of the length; a view."""
        return self.tasks[:, 1]

    @property
    def column(self) -> Int32:
        """[N]: column in the pages; a view."""
        return self.tasks[:, 2]

    @property
    def head(self) -> Int32:
        """[N]: KV head; a view."""
        return self.tasks[:, 3]

    @property
    def kind(self) -> Int32:
        """[N]: kind of the range; a view."""
        return self.tasks[:, 4]

    @property
    def a(self) -> Int32:
        """[N]: first number of the range; a view."""
        return self.tasks[:, 5]

    @property
    def b(self) -> Int32:
        """[N]: second number of the range; a view."""
        return self.tasks[:, 6]

    @property
    def row_begin(self) -> Int32:
        """[N]: first entry of the row list; a view."""
        return self.tasks[:, 7]

    @property
    def row_end(self) -> Int32:
        """[N]: end of its entries; a view."""
        return self.tasks[:, 8]

    @property
    def rows(self) -> Int32:
        """[M]: query row; a view."""
        return self.entries[:, 0]

    @property
    def direct(self) -> Bool:
        """[M]: whether the entry's task writes the output."""
        return np.asarray(self.entries[:, 1] != 0)

    @property
    def slot(self) -> Int32:
        """[M]: place of the partial result; a view."""
        return self.entries[:, 2]

    @property
    def merge_row(self) -> Int32:
        """[S]: query row; a view."""
        return self.segments[:, 0]

    @property
    def merge_head(self) -> Int32:
        """[S]: KV head; a view."""
        return self.segments[:, 1]

    @cached_property
    def shares_rows(self) -> bool:
        """Whether a task serves several rows."""
        return bool((self.row_end - self.row_begin > 1).any())

    @property
    def task_layer(self) -> Int64:
        """[N]: the layer of each task."""
        return np.repeat(np.arange(self.layers, dtype=np.int64), np.diff(self.layer_indptr))

    def of_layer(self, layer: int) -> slice:
        """The tasks of one layer."""
        return slice(int(self.layer_indptr[layer]), int(self.layer_indptr[layer + 1]))

    def merges(self, layer: int) -> slice:
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
    kind: npt.NDArray[np.integer],
    a: npt.NDArray[np.integer],
    b: npt.NDArray[np.integer],
    length: npt.NDArray[np.integer],
    tile: int,
) -> tuple[Int64, Int64]:
    """[N], [N]: begin and end of ranges; the specification for every kernel.

    FRAC divides ceil(length / tile) tiles into b shares, as evenly as whole tiles allow. The last
    tile may be partial.
    """
    length, a, b = (np.asarray(x, np.int64) for x in (length, a, b))
    tiles, shares = -(-length // tile), np.maximum(b, 1)
    choices = [kind == member for member in RangeKind]
    begin = np.select(
        choices, [a, np.minimum(a, length), a * tiles // shares * tile, np.maximum(length - a, 0)]
    )
    end = np.select(
        choices, [b, length, np.minimum((a + 1) * tiles // shares * tile, length), length]
    )
    return begin, end
