"""The form of every decode schedule: which task reads which KV entries for which query rows.

It also says how partial results are merged. Planners produce a `WorkPlan`; kernels execute it. The
KV range of a task is *logical* (`RangeKind`), so a plan stays valid while lengths grow
(PersistentKV: split bounds come from each row's own length).

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
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tangram.errors import ConfigError
from tangram.plan.loops import resolve_tasks
from tangram.plan.records import ADDRESS, Records
from tangram.types import Int32, Int64

Bool = npt.NDArray[np.bool_]

TILE_MULTIPLE = 16


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The input of a planner: R rows that decode one token each.

    `address` [L, R, H] are records of `ADDRESS`, as kernels read them. `budget` [R, L, H] is the
    number of entries that each (row, layer, KV head) is expected to hold while the plan is used.
    `windows` gives each layer's sliding window in tokens, None = full; entry i of a window layer's
    table holds position i.
    """

    address: Records
    budget: npt.NDArray[np.float64 | np.int32]
    windows: tuple[int | None, ...]
    page_tokens: int

    def __post_init__(self) -> None:
        layers, rows, heads = self.address.shape
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
        """From the words of `address`, each [R, L, H]."""
        rows, layers, heads = table.shape
        address = np.empty((layers, rows, heads), ADDRESS)
        for name, words in zip(ADDRESS.names or (), (table, column, length_index), strict=True):
            address[name] = words.swapaxes(0, 1)
        return cls(address, budget, windows, page_tokens)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, L, H)."""
        layers, rows, heads = self.address.shape
        return rows, layers, heads

    @property
    def table(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return np.asarray(self.address["table"].swapaxes(0, 1))

    @property
    def column(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return np.asarray(self.address["column"].swapaxes(0, 1))

    @property
    def length_index(self) -> Int32:
        """[R, L, H]: see `address`; a view."""
        return np.asarray(self.address["length_index"].swapaxes(0, 1))

    def layer(self, layer: int) -> DecodeRows:
        """The same rows in one layer alone, [R, 1, H], for planning layer by layer."""
        single = slice(layer, layer + 1)
        return DecodeRows(
            self.address[single], self.budget[:, single], self.windows[single], self.page_tokens
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

    Layer l owns `tasks` [N] from layer_indptr[l] to layer_indptr[l+1], and `segments` [S] from
    merge_indptr[l] to merge_indptr[l+1]. `entries` [M] are the row list; its runs follow the order
    of tasks. `plan/records.py` has the words of each: `TASK`, `SEGMENT`, `ENTRY`.

    A `direct` entry is the row's only part. Slots are merged in their order, so that equal plans
    give equal bits, and numbered in the order of the merges. `partial_slots` is the most slots that
    any layer uses. A slot holds the G query heads of one row and KV head. `kv_heads` is H. Where
    some layers have other heads, `others` are the plans for those.
    """

    kv_heads: int
    tile_tokens: int
    layer_indptr: Int64
    tasks: Records
    entries: Records
    merge_indptr: Int64
    segments: Records
    partial_slots: int
    others: tuple[WorkPlan, ...] = ()

    @property
    def layers(self) -> int:
        """L."""
        return len(self.layer_indptr) - 1

    @property
    def direct(self) -> Bool:
        """[M]: whether the entry's task writes the output."""
        return np.asarray(self.entries["direct"] != 0)

    @property
    def rows_served(self) -> Int32:
        """[N]: how many rows each task serves."""
        return np.asarray(self.tasks["row_end"] - self.tasks["row_begin"])

    @cached_property
    def shares_rows(self) -> bool:
        """Whether a task serves several rows."""
        return bool((self.rows_served > 1).any())

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
        begin, end = resolve_tasks(self.tasks[tasks], lengths, self.tile_tokens)
        return begin, end
