"""The work queue: tasks cut from each row's true lengths.

PersistentKV, work queue and true-length splits. A layer's tiles divided by `workers ·
tasks_per_worker` are the target size of a task. Each (row, layer, KV head) becomes as many equal
tasks as it takes to stay at or below the target. Where that gives more tasks than requested, the
target grows until they fit: one task too many would make all wait for it. Where there are about as
many cells as workers, one long cell would make all wait, too. There may be more tasks then, but too
few to cut every cell where all are alike. Where tasks are long there can be more of them
(`LONG_TOKENS`). All but a cell's last task are ABS ranges and the last is OPEN, so that rows may
grow without a new plan. In each layer tasks start longest first.

Worked example: 1 layer, 1 KV head, 2 rows of 1000 and 300 entries, 2 workers with 2 tasks each,
tile 128, at least 256 tokens a task. The target is (8 + 3) / 4 = 2.75 tiles. Row 0 becomes 3 tasks
of 2, 3 and 3 tiles. Row 1 would be 2, but is too short for that, so 1:

    task        row  kind  a    b
    0           0    ABS   0    256
    1           0    ABS   256  640
    2           0    OPEN  640  -       at length 1000: 360 entries
    3           1    OPEN  0    -       at length 300
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.loops import SPARE, count_parts, gather_lengths
from tangram.plan.split import Sources, finish, require_positive
from tangram.types import Float64, Int32

# Fewer cells than workers are cut into more tasks by this factor, where each would still read so
# many entries. A multiprocessor then runs several one after the other, and all end at nearly the
# same time. With 3 workers a multiprocessor these are 8 tasks, the fastest number on an H200: up to
# a fifth faster than 3; 5, 10 and 12 were slower.
LONG_TOKENS = 1536
FINER = 8 / 3


@dataclass(frozen=True)
class Grain:
    """How finely a layer is cut: about `workers * tasks_per_worker` tasks of whole tiles.

    A task has at least `min_tokens`: below that its start costs more than its entries. With `finer`
    there are more tasks where all of them are long (`LONG_TOKENS`). Raises `ConfigError` naming the
    field that is out of range.
    """

    workers: int
    tasks_per_worker: int = 1
    tile_tokens: int = 64
    min_tokens: int = 128
    finer: bool = False

    def __post_init__(self) -> None:
        require_positive(
            workers=self.workers,
            tasks_per_worker=self.tasks_per_worker,
            tile_tokens=self.tile_tokens,
            min_tokens=self.min_tokens,
        )


def count_most_tasks(cells: int, grain: Grain) -> int:
    """The most tasks of a layer of so many (row, KV head) cells, whatever their lengths."""
    wanted = max(int(FINER * grain.workers * grain.tasks_per_worker), int(SPARE * cells))
    return wanted + cells  # of each cell the number of parts may be rounded up


def plan_workqueue(rows: DecodeRows, lengths: Int32, grain: Grain) -> WorkPlan:
    """Cut every (row, layer, KV head) by its true length.

    `lengths` is int32 [slots · groups], before later growth.
    """
    count, layers, heads = rows.shape
    end = np.empty((layers, count, heads), np.int32)
    gather_lengths(rows.address, lengths, end)
    return cut(rows, Sources.by_row(count), np.zeros_like(end), end, np.ones(count), grain)


def cut(
    rows: DecodeRows, sources: Sources, begin: Int32, end: Int32, weight: Float64, grain: Grain
) -> WorkPlan:
    """Cut sources [begin, end), both [L, S, H], into equal work.

    An entry of source s weighs `weight[s]` ≥ 1. The last R sources are the rows' own tails, in row
    order: they end OPEN. In sliding-window layers they are read by WINDOW, and all other sources
    are dropped.
    """
    few = grain.workers * grain.tasks_per_worker
    many = int(FINER * few)
    count, work = count_parts(
        begin,
        end,
        weight,
        len(sources.owner) - rows.shape[0],
        rows.windowed,
        few,
        many if grain.finer else few,
        LONG_TOKENS * many,
        grain.tile_tokens,
        grain.min_tokens,
    )
    return finish(rows, sources, count, work, (begin, end), grain.tile_tokens)
