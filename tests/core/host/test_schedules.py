"""What each schedule promises beyond covering every entry: sizes, order, numbers of splits."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import ConfigError
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.records import RangeKind
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram.types import Int32
from tangram_lab.baselines.uniform import plan_buckets, plan_uniform_splits, splits_for


def rows_of(
    rows: int, layers: int, heads: int, windows: tuple[int | None, ...] | None = None
) -> DecodeRows:
    cell = np.arange(rows * layers * heads).reshape(rows, layers, heads)
    return DecodeRows.of(
        cell * 9000, cell % 4, cell, np.full(cell.shape, 1e4), windows or (None,) * layers, 16
    )


def sizes(plan: WorkPlan, lengths: np.ndarray, layer: int = 0) -> np.ndarray:
    begin, end = plan.spans(lengths, plan.of_layer(layer))
    return end - begin


def parts(plan: WorkPlan, rows: DecodeRows) -> list[int]:
    """The number of tasks of each (row, layer, head), in flat order."""
    where = plan.entries["row"], plan.task_layer, plan.tasks["head"]
    cell = np.ravel_multi_index(where, rows.table.shape)
    return np.bincount(cell, minlength=rows.table.size).tolist()


def test_the_work_queues_worked_example() -> None:
    lengths = np.array([1000, 300], np.int32)
    plan = plan_workqueue(
        rows_of(2, 1, 1), lengths, Grain(2, tasks_per_worker=2, tile_tokens=128, min_tokens=256)
    )
    assert plan.entries["row"].tolist() == [0, 0, 0, 1]
    kinds = [RangeKind.ABS, RangeKind.ABS, RangeKind.OPEN, RangeKind.OPEN]
    assert plan.tasks["kind"].tolist() == kinds
    assert plan.tasks["a"].tolist() == [0, 256, 640, 0]
    assert plan.tasks["b"][:2].tolist() == [256, 640]


lengths_of_layers = st.lists(st.integers(0, 60_000), min_size=12, max_size=12).map(
    lambda x: np.array(x, np.int32)
)


@given(
    lengths_of_layers,
    st.sampled_from([1, 8, 132]),
    st.sampled_from([16, 128]),
    st.sampled_from([1, 256, 1000]),
)
def test_queue_tasks_are_as_large_as_the_target_and_no_smaller_than_asked(
    lengths: np.ndarray, workers: int, tile: int, least: int
) -> None:
    rows = rows_of(3, 2, 2)
    plan = plan_workqueue(
        rows, lengths, Grain(workers, tile_tokens=tile, min_tokens=least, tasks_per_worker=4)
    )
    for layer in (0, 1):
        here = lengths[rows.length_index[:, layer]]
        size, inside = sizes(plan, lengths, layer), plan.of_layer(layer)
        assert size.max() <= 2 * max(here.sum() / (workers * 4), least) + 2 * tile
        if here.size <= workers * 4:
            assert (size > 0).sum() <= 1.02 * workers * 4, "one task too many makes all wait for it"
        cut = ~plan.direct[inside]  # one entry a task: nothing is shared
        assert (size[cut] > least - tile).all()


@given(lengths_of_layers)
def test_queue_tasks_start_longest_first(lengths: np.ndarray) -> None:
    rows = rows_of(3, 2, 2)
    plan = plan_workqueue(rows, lengths, Grain(8))
    for layer in (0, 1):
        size = sizes(plan, lengths, layer)
        assert (size[1:] - size[:-1]).max(
            initial=0
        ) <= 2 * 128  # to a tile: those of a head differ by one


@pytest.mark.parametrize("shape", ["uniform", "bimodal", "one long"])
def test_queue_tasks_fill_the_workers_evenly_whatever_the_lengths(shape: str) -> None:
    lengths = np.full(32, 8192, np.int32)
    if shape != "uniform":
        lengths[:] = 3072
        lengths[: 8 if shape == "bimodal" else 1] = 65_536
    plan = plan_workqueue(rows_of(4, 1, 8), lengths, Grain(132))
    finish = np.zeros(132)
    for tokens in sizes(plan, lengths):  # each task goes to the worker that is free first
        finish[finish.argmin()] += tokens
    assert finish.max() <= 1.35 * finish.mean()


def test_a_window_is_one_task_and_counts_only_what_it_sees() -> None:
    lengths = np.array([5000, 5000], np.int32)
    plan = plan_workqueue(rows_of(1, 2, 1, (None, 100)), lengths, Grain(4))
    assert sizes(plan, lengths, 1).tolist() == [100] and len(sizes(plan, lengths, 0)) > 1


def public_heuristic(cells: int, workers: int, tiles: int) -> int:
    """The number of splits, step by step as the description has it."""
    if cells >= 0.8 * workers:
        return 1
    eligible = [
        s
        for s in range(1, min(128, workers, max(tiles, 1)) + 1)
        if s == 1 or ceil(tiles / s) != ceil(tiles / (s - 1))
    ]
    filled = {s: cells * s / workers / ceil(cells * s / workers) for s in eligible}
    return min(s for s in eligible if filled[s] >= 0.85 * max(filled.values()))


@given(st.integers(1, 300), st.sampled_from([1, 7, 108, 132, 264]), st.integers(0, 600))
def test_uniform_splits_follow_the_public_heuristic(cells: int, workers: int, tiles: int) -> None:
    assert splits_for(np.array(cells), np.array(tiles), workers) == public_heuristic(
        cells, workers, tiles
    )


def test_uniform_splits_are_one_number_for_all_heads_from_the_longest() -> None:
    rows, lengths = rows_of(2, 1, 8), np.full(16, 10, np.int32)
    lengths[3] = 4096
    plan = plan_uniform_splits(rows, lengths, 132)
    assert set(parts(plan, rows)) == {7} and (plan.tasks["kind"] == RangeKind.FRAC).all()


def test_exact_buckets_split_heads_of_equal_length_alike_as_if_alone() -> None:
    rows, lengths = rows_of(4, 1, 1), np.array([8192, 1024, 1024, 1000], np.int32)
    plan = plan_buckets(rows, lengths, 16)
    alone, pair = public_heuristic(1, 16, 64), public_heuristic(2, 16, 8)
    assert (
        parts(plan, rows) == [alone, pair, pair, public_heuristic(1, 16, 8)]
        and alone > 1
        and pair > 1
    )


def test_padded_buckets_leave_splits_beyond_the_true_length_empty() -> None:
    rows, lengths = rows_of(2, 1, 1), np.array([4097, 8192], np.int32)
    plan = plan_buckets(rows, lengths, 16, kind="padded")
    split = public_heuristic(2, 16, 64)
    assert parts(plan, rows) == [split, split] and split > 2
    size = sizes(plan, lengths)
    assert (size[plan.entries["row"] == 1] > 0).all()
    assert (size[plan.entries["row"] == 0] == 0).sum() == split - (4096 // (8192 // split) + 1)


def cut_finely(rows: DecodeRows, lengths: Int32, **options: int) -> WorkPlan:
    return plan_workqueue(rows, lengths, Grain(**options))


@pytest.mark.parametrize(
    ("planner", "options", "field"),
    [
        (cut_finely, {"workers": 0}, "workers"),
        (cut_finely, {"tasks_per_worker": 0}, "tasks_per_worker"),
        (cut_finely, {"min_tokens": 0}, "min_tokens"),
        (cut_finely, {"tile_tokens": 24}, "tile_tokens"),
        (plan_uniform_splits, {"workers": 0}, "workers"),
        (plan_buckets, {"kind": "rounded"}, "kind"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    planner: object, options: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        planner(rows_of(1, 1, 1), np.array([5], np.int32), **{"workers": 2, **options})  # type: ignore[operator]
