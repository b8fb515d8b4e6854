"""A work plan as the GPU reads it: int32 arrays, tasks sorted by tile, static capacities (host side)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.form import RangeKind, WorkPlan
from tangram.plan.schedule import TILE_NUMBERS, Schedule
from tangram.types import Int32, Int64

TASK_FIELDS = 12  # table, length_index, column, head, kind, a, b, row_begin, row_end; row, direct, slot of the first
ENTRY_FIELDS = 4  # row, direct, slot, segment


@dataclass(frozen=True)
class Tile:
    """How tasks of up to `queries` query rows (rows x G) run: the tile of entries, warps and pipeline stages."""

    queries: int
    entries: int = 64
    warps: int = 4
    stages: int = 2


# Chosen by trial on an H100: a tile of 8 rows takes half the registers of one of 16.
TILES = (Tile(8), Tile(16, warps=2), Tile(32), Tile(64, stages=3), Tile(128, entries=32, stages=3))
SHORT_TILE = Tile(8, entries=16, warps=1, stages=1)
SHORT_TOKENS = 64


@dataclass(frozen=True)
class DecodeOptions:
    """What may be chosen without changing a result but in the last place.

    A task takes the first of `tiles` that holds its rows; a short one (at most 64 tokens) that serves one row takes
    `short`, which wants many small programs on a multiprocessor rather than a deep pipeline in each. A layer of
    at most `one_tile_tasks` tasks runs them all with its largest tile, in one launch. `merge` says who merges parts:
    "kernel" a kernel of its own, "atomic" whichever task comes last. `chained` lets each launch start
    while the one before it ends. `programs` bounds the grid of each launch.
    """

    tiles: tuple[Tile, ...] = TILES
    short: Tile = SHORT_TILE
    one_tile_tasks: int = 512
    merge: Literal["kernel", "atomic"] = "kernel"
    chained: bool = True
    programs: int = 8192

    def __post_init__(self) -> None:
        if self.merge not in ("kernel", "atomic"):
            raise ConfigError(f"merge is {self.merge!r}, it must be kernel or atomic")

    @classmethod
    def of(cls, schedule: Schedule) -> DecodeOptions:
        """What a schedule asks of the kernels; its tile numbers apply to every tile but `short`."""
        changed = {name: value for name, value in schedule.numbers.items() if name in TILE_NUMBERS}
        tiles = tuple(replace(tile, **changed) for tile in TILES)
        one = 1 << 30 if "onetile" in schedule.flags else cls.one_tile_tasks
        merge: Literal["kernel", "atomic"] = "atomic" if "atomic" in schedule.flags else "kernel"
        return cls(tiles, one_tile_tasks=one, merge=merge, chained="serial" not in schedule.flags)

    @property
    def kinds(self) -> tuple[Tile, ...]:
        """Every way a task can run: `short` first, then `tiles`."""
        return (self.short, *self.tiles)


def segment_of(plan: WorkPlan) -> Int64:
    """[M]: the merge segment of each entry of the row list, 0 where the entry is final."""
    if not len(plan.merge_row):
        return np.zeros(len(plan.rows), np.int64)
    segment = np.repeat(np.arange(len(plan.merge_row)), np.diff(plan.part_indptr))
    first_part = plan.part_indptr[plan.merge_indptr[:-1]]
    entry_layer = np.repeat(plan.task_layer, plan.row_end - plan.row_begin)
    return np.where(plan.direct, 0, segment[np.where(plan.direct, 0, first_part[entry_layer] + plan.slot)])


@dataclass(frozen=True, eq=False)
class Packed:
    """A plan's arrays and how many tasks of each kind every layer has, [L, kinds]."""

    arrays: dict[str, Int64]
    counts: Int64


def pack(plan: WorkPlan, group: int, options: DecodeOptions, lengths: Int32 | None) -> Packed:
    """Sort each layer's tasks by kind, keeping their order, and lay out what the kernels read.

    Raises `ConfigError` if a task serves more queries than the largest tile holds.
    """
    kind = _kinds(plan, group, options, lengths)
    kinds = len(options.kinds)
    key = (plan.task_layer * kinds + kind).astype(np.uint16 if plan.layers * kinds < 65536 else np.int64)
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=plan.layers * kinds).reshape(plan.layers, kinds)
    tasks = np.empty((len(order), TASK_FIELDS), np.int32)
    first = plan.row_begin
    fields = (plan.table, plan.length_index, plan.column, plan.head, plan.kind, plan.a, plan.b, first, plan.row_end,
              plan.rows[first], plan.direct[first], plan.slot[first])  # fmt: skip
    for column, values in enumerate(fields):
        tasks[:, column] = values[order]
    segment = segment_of(plan) if options.merge == "atomic" else np.zeros_like(plan.rows)
    entries = np.stack([plan.rows, plan.direct, plan.slot, segment], axis=1)
    arrays = {
        "tasks": tasks, "entries": entries, "segments": np.stack([plan.merge_row, plan.merge_head], axis=1),
        "part_indptr": plan.part_indptr, "merge_indptr": plan.merge_indptr,
        "task_indptr": plan.layer_indptr[:-1, None] + np.pad(counts.cumsum(axis=1), ((0, 0), (1, 0))),
    }  # fmt: skip
    return Packed(arrays, counts)


def _kinds(plan: WorkPlan, group: int, options: DecodeOptions, lengths: Int32 | None) -> Int64:
    """[N]: the kind of each task."""
    queries = (plan.row_end - plan.row_begin) * group
    limits = [tile.queries for tile in options.tiles]
    if len(queries) and queries.max() > limits[-1]:
        raise ConfigError(
            f"a task serves {queries.max()} queries, the largest tile holds {limits[-1]}: plan with "
            f"max_query_rows={limits[-1]}"
        )
    kind = 1 + np.searchsorted(limits, queries)
    if np.diff(plan.layer_indptr).max(initial=0) <= options.one_tile_tasks:
        return np.full(len(kind), kind.max(initial=1))
    if lengths is not None:
        begin, end = plan.spans(lengths)
        alone = (plan.row_end - plan.row_begin == 1) & (plan.kind <= RangeKind.OPEN) & (group <= options.short.queries)
        kind[alone & (end - begin <= SHORT_TOKENS)] = 0
    return kind


@dataclass(frozen=True)
class Capacity:
    """The largest plan that buffers hold: sizes of its arrays, and what one layer launches at most.

    `tasks` [kinds] and `segments` bound one layer's launches, `segment_parts` the parts of a segment.
    """

    sizes: dict[str, int]
    slots: int
    tasks: tuple[int, ...]
    segments: int
    segment_parts: int

    @classmethod
    def of(cls, plans: Sequence[WorkPlan], packed: Sequence[Packed]) -> Capacity:
        """The smallest capacity that holds each of `plans`, which are `packed`."""
        return cls(
            sizes={name: max(1, *(one.arrays[name].size for one in packed)) for name in packed[0].arrays},
            slots=max(plan.partial_slots for plan in plans),
            tasks=tuple(np.max([one.counts.max(axis=0) for one in packed], axis=0).tolist()),
            segments=max(int(np.diff(plan.merge_indptr).max(initial=0)) for plan in plans),
            segment_parts=max(int(np.diff(plan.part_indptr).max(initial=0)) for plan in plans),
        )
