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

from tangram.plan.form import DecodeRows, RangeKind, WorkPlan
from tangram.plan.split import Parts, Sources, finish, fit_parts, require_positive
from tangram.types import Float64, Int32, Int64

# Parts for each cell where these are about as many as workers: enough to cut the long ones, not
# all.
SPARE = 1.75
# Fewer cells than workers are cut into more tasks by this factor, where each would still read so
# many entries. A multiprocessor then runs several one after the other, and all end at nearly the
# same time. With 3 workers a multiprocessor these are 8 tasks, the fastest number on an H200: up to
# a fifth faster than 3; 5, 10 and 12 were slower.
LONG_TOKENS = 1536
FINER = 8 / 3


@dataclass(frozen=True)
class Grain:
    """How finely a layer is cut: about `workers * tasks_per_worker` tasks of whole tiles.

    A task has at least `min_tokens`. With `finer` there are more tasks where all of them are long
    (`LONG_TOKENS`). Raises `ConfigError` naming the field that is out of range.
    """

    workers: int
    tasks_per_worker: int
    tile_tokens: int
    min_tokens: int
    finer: bool = False

    def __post_init__(self) -> None:
        require_positive(
            workers=self.workers,
            tasks_per_worker=self.tasks_per_worker,
            tile_tokens=self.tile_tokens,
            min_tokens=self.min_tokens,
        )


def plan_workqueue(
    rows: DecodeRows,
    lengths: Int32,
    workers: int,
    *,
    tile_tokens: int = 64,
    min_tokens: int = 128,
    tasks_per_worker: int = 1,
    finer: bool = False,
) -> WorkPlan:
    """Cut every (row, layer, KV head) by its true length.

    `lengths` is int32 [slots · groups], before later growth. A task reads at least `min_tokens`:
    below that its start costs more than its entries. `finer` is that of `Grain`. Raises
    `ConfigError` naming the argument that is out of range.
    """
    grain = Grain(workers, tasks_per_worker, tile_tokens, min_tokens, finer)
    end = lengths[rows.length_index].swapaxes(0, 1).astype(np.int64)
    own = Sources.own(end.shape[1])
    return cut(rows, own, np.zeros_like(end), end, np.ones(len(own.owner)), grain)


def cut(
    rows: DecodeRows, sources: Sources, begin: Int64, end: Int64, weight: Float64, grain: Grain
) -> WorkPlan:
    """Cut sources [begin, end), both [L, S, H], into equal work.

    An entry of source s weighs `weight[s]` ≥ 1. The last R sources are the rows' own tails, in row
    order: they end OPEN. In sliding-window layers they are read by WINDOW, and all other sources
    are dropped.
    """
    shared = end.shape[1] - len(rows.table)
    tokens = np.maximum(end - begin, 0)
    count, work = _count(rows, tokens, weight, shared, grain)
    tasks = Parts.of(count, work / np.maximum(count, 1))
    a = _begins(tasks, tokens, grain.tile_tokens)
    b, kind = np.empty_like(a), np.zeros_like(a)
    if shared:
        a += tasks.per_cell(begin)
    b[:-1] = a[1:]
    b[tasks.last] = 0
    kind[tasks.last] = int(RangeKind.OPEN)
    if shared:
        every = np.arange(end.shape[1])[:, None]
        closed = tasks.last[
            np.broadcast_to(every < shared, end.shape).ravel().take(tasks.cell.take(tasks.last))
        ]
        b[closed] = end.ravel().take(tasks.cell.take(closed))
        kind[closed] = int(RangeKind.ABS)
    return finish(rows, sources, tasks, kind, a, b, grain.tile_tokens)


def _count(
    rows: DecodeRows, tokens: Int64, weight: Float64, shared: int, grain: Grain
) -> tuple[Int64, Float64]:
    """[L, S, H]: the number of parts, and the work of each cell.

    A tail has at least one part; in window layers it has exactly one.
    """
    tile, least = grain.tile_tokens, -(-grain.min_tokens // grain.tile_tokens)
    work = tokens * weight[:, None]
    few, cells = grain.workers * grain.tasks_per_worker, tokens[0].size
    many = int(FINER * few)
    long = work.sum(axis=(1, 2), keepdims=True) >= LONG_TOKENS * many
    wanted = np.where(long & grain.finer & (cells <= few), many, few)
    wanted = np.where(cells <= 2 * wanted, np.maximum(wanted, int(SPARE * cells)), wanted)
    tiles, most = -(-tokens // tile) * weight[:, None], np.maximum(tokens // grain.min_tokens, 1)
    target = np.maximum(tiles.sum(axis=(1, 2), keepdims=True) / wanted, least)
    count = fit_parts(tiles, target, wanted, most)
    np.maximum(count[:, shared:], 1, out=count[:, shared:])
    count[rows.windowed, :shared], count[rows.windowed, shared:] = 0, 1
    return count, work


def _begins(tasks: Parts, tokens: Int64, tile: int) -> Int64:
    """[N]: where each part begins, relative to its cell; parts differ by at most one tile.

    Larger parts come last, where the last tile may be partial.
    """
    tiles, count = -(-tokens // tile), tasks.count
    # Exact, and far faster than integer division.
    base = (tiles / np.maximum(count, 1)).astype(np.int64)
    begin = tasks.number - tasks.per_cell(count - (tiles - base * count))
    np.maximum(begin, 0, out=begin)
    begin += tasks.number * tasks.per_cell(base)
    begin *= tile
    return begin
