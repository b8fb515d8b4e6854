"""A work plan as the GPU reads it (host side).

int32 arrays, tasks sorted by tile, static capacities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tangram.errors import ConfigError
from tangram.kernels.interface import MOST_QUERIES
from tangram.kernels.triton.sorted_tasks import find_finishers, find_kinds, sort_by_kind
from tangram.kernels.triton.tiling import Tile
from tangram.plan.form import Bool, WorkPlan
from tangram.plan.records import ENTRY, SEGMENT, TASK, as_words
from tangram.plan.rehearsal import rehearse_planning
from tangram.types import Int32, Int64

WORD_BYTES = 4
FIXED = ("task_indptr", "merge_indptr")  # arrays whose sizes do not depend on the plan

# Fastest on an H100: a tile of 8 rows takes half the registers of one of 16. Queries are rows x G.
TILES = (
    Tile(8),
    Tile(16, warps=2),
    Tile(32, warps=2),
    Tile(64, stages=3),
    Tile(MOST_QUERIES, entries=32, stages=3),
)
SHORT_TILE = Tile(8, entries=16, warps=1, stages=1)
SHORT_TOKENS = 64
FINISHING = 2  # the smallest kinds, whose tasks may finish rows


@dataclass(frozen=True)
class DecodeOptions:
    """Options that change a result in its last place at most.

    A task takes the first of `tiles` that holds its rows. A short task (at most `short_tokens`)
    that serves one row takes `short`, which runs many small programs on a multiprocessor instead
    of deep pipelines. A layer of at most `one_tile_tasks` tasks runs them all with its largest
    tile, in one launch.

    `merge` says what merges parts. "tails": a row's last part does if it alone runs with the
    smallest tile, which is launched last; a separate kernel merges the other rows. "kernel": that
    kernel alone. With `chained` each launch may start while the last ends. `programs`
    bounds the grid of each launch.
    """

    tiles: tuple[Tile, ...] = TILES
    short: Tile = SHORT_TILE
    one_tile_tasks: int = 512
    merge: Literal["tails", "kernel"] = "tails"
    chained: bool = True
    programs: int = 8192
    short_tokens: int = SHORT_TOKENS

    def of_rows(self, queries: int) -> DecodeOptions:
        """The same for rows of up to `queries` tokens: of several there are no short tasks."""
        return replace(self, short_tokens=0) if queries > 1 else self

    @property
    def kinds(self) -> tuple[Tile, ...]:
        """Every way a task can run: `short` first, then `tiles`."""
        return (self.short, *self.tiles)


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """A plan's arrays, and counts per layer and kind, [L, kinds].

    `arrays` have the records of a `WorkPlan`, the tasks of each layer sorted by kind: int32
    `task_indptr` [L, kinds + 1], `merge_indptr` [L + 1], `tasks`, `entries` and `segments`. Where a
    task merges other parts of a row, its entry is `direct` and says how many are `before`. `counts`
    are the tasks, `finishes` the entries that finish a row.
    """

    arrays: dict[str, npt.NDArray[Any]]
    counts: Int64
    finishes: Int64

    @property
    def sizes(self) -> dict[str, int]:
        """How many int32 words each of the arrays has."""
        return {name: array.nbytes // WORD_BYTES for name, array in self.arrays.items()}


def pack(
    plan: WorkPlan,
    group: int,
    options: DecodeOptions,
    lengths: Int32 | None,
    finishing: Bool | None = None,
    into: Int32 | None = None,
) -> PackedPlan:
    """Sort each layer's tasks by kind, keeping their order, and build the arrays for the kernels.

    `finishing` [kinds] says whose tasks may finish rows, if `options` allow it (default: the two
    smallest kinds). All arrays lie end to end in `into`, of at least `count_words`, in the order of
    `PackedPlan`. Raises `ConfigError` if a task serves more queries than the largest tile holds.
    """
    kind, kinds = _kinds(plan, group, options, lengths), len(options.kinds)
    whole = np.empty(count_words(plan, options), np.int32) if into is None else into
    arrays, end = dict[str, npt.NDArray[Any]](), 0
    for name, array in _forms(plan, options).items():
        begin, end = end, end + array.nbytes // WORD_BYTES
        arrays[name] = whole[begin:end].view(array.dtype).reshape(array.shape)
    counts, finishes = np.zeros((2, plan.layers, kinds), np.int64)
    tasks, task_indptr = arrays["tasks"], arrays["task_indptr"]
    sort_by_kind(plan.tasks, kind, plan.layer_indptr, tasks, task_indptr, counts)
    as_words(arrays["entries"])[:] = as_words(plan.entries)
    merges, segments = arrays["merge_indptr"], arrays["segments"]
    merges[:] = plan.merge_indptr
    if options.merge == "tails" and len(segments):
        may = np.arange(kinds) < FINISHING if finishing is None else finishing
        left = find_finishers(
            tasks,
            arrays["entries"],
            task_indptr,
            may,
            plan.segments,
            plan.merge_indptr,
            segments,
            merges,
            finishes,
        )
        arrays["segments"] = segments[:left]
    else:
        as_words(segments)[:] = as_words(plan.segments)
    return PackedPlan(arrays, counts, finishes)


def rehearse_packing() -> None:
    """Compile planning and packing (~20 s), or load them from Numba's cache (~0.7 s)."""
    plan, lengths = rehearse_planning()
    pack(plan, 1, DecodeOptions(one_tile_tasks=0), lengths)


def count_words(plan: WorkPlan, options: DecodeOptions) -> int:
    """The most int32 numbers that `pack` makes of `plan`."""
    return sum(array.nbytes for array in _forms(plan, options).values()) // WORD_BYTES


def _forms(plan: WorkPlan, options: DecodeOptions) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the dtypes and shapes of `PackedPlan.arrays`, whatever tasks finish."""
    return {
        "task_indptr": np.empty((plan.layers, len(options.kinds) + 1), np.int32),
        "merge_indptr": np.empty(plan.layers + 1, np.int32),
        "tasks": plan.tasks,
        "entries": plan.entries,
        "segments": plan.segments,
    }


def _kinds(
    plan: WorkPlan, group: int, options: DecodeOptions, lengths: Int32 | None
) -> npt.NDArray[np.uint8]:
    """[N]: the kind of each task."""
    kind = np.empty(len(plan.tasks), np.uint8)
    limits = np.array([tile.queries for tile in options.tiles])
    one_tile = np.diff(plan.layer_indptr).max(initial=0) <= options.one_tile_tasks
    brief = lengths is not None and group <= options.short.queries and not one_tile
    known = np.zeros(0, np.int32) if lengths is None else lengths
    most = find_kinds(plan.tasks, known, limits, group, options.short_tokens * brief, kind)
    if most > limits[-1]:
        raise ConfigError(
            f"a task serves {most} queries, the largest tile holds {limits[-1]}: plan "
            f"with max_query_rows={limits[-1]}"
        )
    if one_tile:
        kind[:] = kind.max(initial=1)
    return kind


@dataclass(frozen=True)
class Capacity:
    """The largest plan that buffers hold: sizes of its arrays, and the largest launches of a layer.

    `tasks` [kinds] and `segments` bound one layer's launches, `segment_parts` the parts of a
    segment. `finishes` [kinds] says which launches finish rows.
    """

    sizes: dict[str, int]
    slots: int
    tasks: tuple[int, ...]
    finishes: tuple[bool, ...]
    segments: int
    segment_parts: int

    @property
    def rounded(self) -> Capacity:
        """Positive sizes rounded up to powers of two, because consecutive plans differ a little."""
        return Capacity(
            {name: size if name in FIXED else _round_up(size) for name, size in self.sizes.items()},
            _round_up(self.slots),
            tuple(_round_up(count) for count in self.tasks),
            self.finishes,
            _round_up(self.segments),
            _round_up(self.segment_parts),
        )

    @property
    def doubled(self) -> Capacity:
        """Twice the sizes: plans for as many rows of other lengths have up to that many tasks."""
        sizes = {name: size if name in FIXED else 2 * size for name, size in self.sizes.items()}
        return replace(self, sizes=sizes, slots=2 * self.slots)

    def launching_all(self, options: DecodeOptions, parts: int) -> Capacity:
        """The same for a plan that has tasks of every kind and merges of `parts` parts.

        Its smallest kinds finish rows.
        """
        kinds = range(len(options.kinds))
        finishes = tuple(options.merge == "tails" and kind < FINISHING for kind in kinds)
        return replace(
            self, tasks=(1,) * len(kinds), finishes=finishes, segments=1, segment_parts=parts
        )

    def sharing(self, options: DecodeOptions, group: int, rows: int, least: int) -> Capacity:
        """The same for plans whose tasks serve one to `rows` rows of `group` queries each.

        Which kinds have tasks then differs from plan to plan. Each kind that may have some is
        launched with at least `least` programs.
        """
        limits = [tile.queries for tile in options.tiles]
        first, last = 1 + np.searchsorted(limits[:-1], (group, group * rows))
        kinds = set(range(first, last + 1))
        if options.short_tokens and group <= options.short.queries:
            kinds.add(0)
        tasks = tuple(
            max(count, least) if kind in kinds else count for kind, count in enumerate(self.tasks)
        )
        finishes = self.launching_all(options, self.segment_parts).finishes
        segments = max(self.segments, least)
        return replace(self, tasks=tasks, finishes=finishes, segments=segments)

    def holding(self, layers: int, tasks: int, cells: int) -> Capacity:
        """The same for so many `tasks` of each layer, of one row each, and `cells` of rows."""
        records = {"tasks": (TASK, tasks), "entries": (ENTRY, tasks), "segments": (SEGMENT, cells)}
        sizes = {
            name: layers * count * record.itemsize // WORD_BYTES
            for name, (record, count) in records.items()
        }
        return replace(self, sizes=self.sizes | sizes, slots=tasks, segment_parts=tasks)

    def with_slack(self, least: Capacity | None) -> Capacity:
        """Space for later plans too: doubled for a first one, or else at least `least`."""
        return self.rounded.doubled if least is None else self.join(least).rounded

    def join(self, other: Capacity) -> Capacity:
        """The smallest capacity that holds both."""
        return Capacity(
            {name: max(size, other.sizes[name]) for name, size in self.sizes.items()},
            max(self.slots, other.slots),
            tuple(max(pair) for pair in zip(self.tasks, other.tasks, strict=True)),
            tuple(any(pair) for pair in zip(self.finishes, other.finishes, strict=True)),
            max(self.segments, other.segments),
            max(self.segment_parts, other.segment_parts),
        )

    def misfit(self, plan: WorkPlan, packed: PackedPlan) -> str | None:
        """Which part of the plan is too large, with the limit; None if it fits."""
        for name, size in packed.sizes.items():
            if size > self.sizes[name]:
                return f"the plan has {size} values in {name}, the buffers hold {self.sizes[name]}"
        for kind, (count, most) in enumerate(
            zip(packed.counts.max(axis=0).tolist(), self.tasks, strict=True)
        ):
            if count and not most:
                kinds = [kind for kind, tasks in enumerate(self.tasks) if tasks]
                return f"the plan has tasks of tile {kind}, the buffers were made for tiles {kinds}"
        if plan.partial_slots > self.slots:
            return f"the plan has {plan.partial_slots} slots, the buffers hold {self.slots}"
        return None

    @classmethod
    def for_plan(
        cls, plan: WorkPlan, group: int, options: DecodeOptions, lengths: Int32 | None
    ) -> Capacity:
        """The smallest capacity that holds `plan`, packed as `pack` does."""
        return cls.of(plan, pack(plan, group, options, lengths))

    @classmethod
    def of(cls, plan: WorkPlan, packed: PackedPlan) -> Capacity:
        """The smallest capacity that holds `plan`, which is `packed`."""
        segments = packed.arrays["segments"]
        return cls(
            {name: max(1, size) for name, size in packed.sizes.items()},
            plan.partial_slots,
            tuple(packed.counts.max(axis=0).tolist()),
            tuple(np.any(packed.finishes, axis=0).tolist()),
            int(np.diff(packed.arrays["merge_indptr"]).max(initial=0)),
            int(np.subtract(segments["end_slot"], segments["first_slot"]).max(initial=0)),
        )


def _round_up(value: int) -> int:
    """The power of two at or above `value`; 0 stays 0."""
    return 1 << (value - 1).bit_length() if value else 0
