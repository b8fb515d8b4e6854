"""Work plans: planners give plans that pass the integrity check, which catches every plan that does
not add up.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import ConfigError, IntegrityError
from tangram.plan.aot import plan_aot
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.records import RangeKind
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import Grain, count_most_tasks, plan_workqueue
from tangram.types import Int32
from tangram_lab.baselines.uniform import plan_buckets, plan_uniform_splits
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tests.plans import TaskList, assemble, change_plan


def make_rows(
    budget: np.ndarray, windows: tuple[int | None, ...] | None = None, page_tokens: int = 16
) -> DecodeRows:
    cell = np.arange(budget.size).reshape(budget.shape)
    return DecodeRows.of(
        cell * 100, cell % 4, cell, budget, windows or (None,) * budget.shape[1], page_tokens
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[DecodeRows, Int32]:
    """Rows with any budgets and windows, and a length for each head."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    windows = tuple(
        draw(st.lists(st.sampled_from([None, 1, 50, 128]), min_size=shape[1], max_size=shape[1]))
    )
    longest = draw(st.sampled_from([1, 20, 700]))
    lengths = seed.integers(0, longest + 1, shape).astype(np.int32).ravel()
    return make_rows(seed.uniform(1.0, 4000.0, shape), windows), lengths


def every_plan(rows: DecodeRows, lengths: Int32, workers: int, tile_tokens: int) -> list[WorkPlan]:
    least = {16: 1, 64: 64, 256: 300}[tile_tokens]
    return [
        plan_plain(rows),
        plan_aot(rows, workers, tile_tokens=tile_tokens),
        plan_workqueue(rows, lengths, Grain(workers, tile_tokens=tile_tokens, min_tokens=least)),
        plan_uniform_splits(rows, lengths, workers, tile_tokens=tile_tokens),
        plan_buckets(rows, lengths, workers, kind="exact", tile_tokens=tile_tokens),
        plan_buckets(rows, lengths, workers, kind="padded", tile_tokens=tile_tokens),
    ]


@given(batches(), st.sampled_from([1, 2, 7, 132]), st.sampled_from([16, 64, 256]))
def test_a_plan_covers_every_entry_once_and_survives_growth(
    batch: tuple[DecodeRows, Int32], workers: int, tile_tokens: int
) -> None:
    rows, lengths = batch
    for plan in every_plan(rows, lengths, workers, tile_tokens):
        for grown_tokens in (0, 1, 300):
            check_plan(plan, rows, lengths + np.int32(grown_tokens))


@given(batches(), st.sampled_from([1, 2, 7, 132]), st.booleans())
def test_a_layer_has_no_more_tasks_than_can_be_told_beforehand(
    batch: tuple[DecodeRows, Int32], workers: int, finer: bool
) -> None:
    rows, lengths = batch
    grain = Grain(workers, tile_tokens=16, min_tokens=16, finer=finer)
    plan = plan_workqueue(rows, lengths, grain)
    most = count_most_tasks(rows.shape[0] * rows.shape[2], grain)
    assert np.diff(plan.layer_indptr).max() <= most
    assert plan.partial_slots <= most


@given(batches(), st.sampled_from([1, 7, 132]))
def test_every_planner_agrees_with_counting_entries_one_by_one(
    batch: tuple[DecodeRows, Int32], workers: int
) -> None:
    rows, lengths = batch
    for plan in every_plan(rows, lengths, workers, 16):
        assert covered_once(plan, rows, lengths)


@given(batches(), st.sampled_from([1, 7, 132]))
def test_a_layer_is_planned_alone_as_it_is_among_others(
    batch: tuple[DecodeRows, Int32], workers: int
) -> None:
    rows, lengths = batch
    whole = plan_workqueue(rows, lengths, Grain(workers, tile_tokens=16, min_tokens=16))
    for layer in range(whole.layers):
        alone = plan_workqueue(
            rows.layer(layer), lengths, Grain(workers, tile_tokens=16, min_tokens=16)
        )
        inside = whole.of_layer(layer)
        for name in ("table", "length_index", "column", "head", "kind", "a", "b"):
            assert alone.tasks[name].tolist() == whole.tasks[name][inside].tolist()


def covered_once(plan: WorkPlan, rows: DecodeRows, lengths: Int32) -> bool:
    """The law of the check, entry by entry and in plain loops."""
    length = lengths[rows.length_index]
    seen = np.zeros((*rows.table.shape, 2000), np.int64)
    for task, layer in zip(plan.tasks, plan.task_layer, strict=True):
        source = (task["table"], task["column"], task["length_index"])
        for row in plan.entries["row"][task["row_begin"] : task["row_end"]]:
            cell = (row, layer, task["head"])
            if source != (rows.table[cell], rows.column[cell], rows.length_index[cell]):
                return False
            n, a, b = int(length[cell]), int(task["a"]), int(task["b"])
            tile = plan.tile_tokens
            tiles = -(-n // tile)
            match task["kind"]:
                case RangeKind.ABS:
                    span = range(a, b)
                case RangeKind.OPEN:
                    span = range(min(a, n), n)
                case RangeKind.FRAC if b == 0:
                    return False  # a share of no shares means nothing
                case RangeKind.FRAC:
                    span = range(tiles * a // b * tile, min(n, tiles * (a + 1) // b * tile))
                case _:
                    span = range(max(0, n - a), n)
            if span.start > span.stop:
                return False
            for entry in span:
                seen[(*cell, entry)] += 1
    for cell in np.ndindex(rows.table.shape):
        window = rows.windows[cell[1]]
        start = 0 if window is None else max(0, length[cell] - window)
        wanted = (np.arange(2000) >= start) & (np.arange(2000) < length[cell])
        if (seen[cell] != wanted).any():
            return False
    return True


@given(batches(), st.sampled_from(["a", "b", "kind", "table", "column", "length_index"]), st.data())
def test_the_check_agrees_with_counting_entries_one_by_one(
    batch: tuple[DecodeRows, Int32], field: str, data: st.DataObject
) -> None:
    rows, lengths = batch
    plan = plan_aot(rows, 6, tile_tokens=16)
    values = plan.tasks[field].copy()
    index = data.draw(st.integers(0, len(values) - 1))
    values[index] = data.draw(st.integers(0, 3 if field == "kind" else 130))
    broken = change_plan(plan, f"tasks.{field}", values)
    try:
        check_plan(broken, rows, lengths)
    except IntegrityError:
        assert not covered_once(broken, rows, lengths)
    else:
        assert covered_once(broken, rows, lengths)


# 2 rows, 1 layer, 2 heads: some split, some whole
UNEVEN = make_rows(np.array([[[1000, 100.0]], [[500, 100.0]]]))
LENGTHS = np.array([400, 40, 200, 40], np.int32)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("entries.row", 0, 1),  # another row's query
        ("entries.row", 0, 99),
        ("tasks.head", 0, 1),
        ("tasks.head", 0, -1),
        ("entries.slot", 0, 1),  # two parts in one slot
        ("entries.slot", 0, 99),
        ("entries.direct", 0, 1),  # a part that overwrites the output
        ("entries.direct", -1, 0),  # a whole result that nobody merges
        ("segments.first_slot", 0, 1),  # a part merged never
        ("segments.end_slot", 0, 1),
        ("segments.end_slot", 0, 99),
        ("segments.row", 0, 1),
        ("segments.head", 0, 1),
        ("tasks.row_end", 0, 0),
        ("tasks.row_begin", 1, 0),
        ("tasks.kind", 0, 4),
        ("tasks.b", 0, 0),  # a share of no shares
        ("layer_indptr", 1, 3),
        ("merge_indptr", 1, 0),
    ],
)
def test_the_check_names_outputs_that_do_not_add_up(field: str, index: int, value: int) -> None:
    plan = plan_aot(UNEVEN, 2, tasks_per_worker=4, tile_tokens=16)
    check_plan(plan, UNEVEN, LENGTHS)
    assert not plan.direct[0] and plan.direct[-1]
    with pytest.raises(IntegrityError, match="work plan"):
        check_plan(change_plan(plan, field, value, index), UNEVEN, LENGTHS)


def test_a_missing_task_is_caught() -> None:
    plan = plan_plain(UNEVEN)
    short = replace(
        plan, tasks=plan.tasks[:3], entries=plan.entries[:3], layer_indptr=np.array([0, 3])
    )
    with pytest.raises(IntegrityError):
        check_plan(short, UNEVEN, LENGTHS)


def shared_prefix_plan() -> WorkPlan:
    """Both rows read head 0's first 32 entries in one task, and each its own tail; head 1 is read
    whole.
    """
    zero = np.zeros(5, np.int64)
    return assemble(
        TaskList(
            layer=zero,
            table=UNEVEN.table[[0, 0, 1, 0, 1], 0, [0, 0, 0, 1, 1]],
            length_index=np.array([0, 0, 2, 1, 3]),
            column=UNEVEN.column[[0, 0, 1, 0, 1], 0, [0, 0, 0, 1, 1]],
            head=np.array([0, 0, 0, 1, 1]),
            kind=np.array([0, 1, 1, 1, 1]),
            a=np.array([0, 32, 32, 0, 0]),
            b=np.array([32, 0, 0, 0, 0]),
            row_count=np.array([2, 1, 1, 1, 1]),
            rows=np.array([0, 1, 0, 1, 0, 1]),
        ),
        layers=1,
        kv_heads=2,
        tile_tokens=16,
    )


def test_a_span_may_serve_several_rows_only_if_they_share_its_pages() -> None:
    address = UNEVEN.address.copy()
    address["column"] = 0
    rows = replace(UNEVEN, address=address)
    plan = change_plan(shared_prefix_plan(), "tasks.column", 0)
    tables = np.arange(400, dtype=np.int32)
    with pytest.raises(IntegrityError, match="pass tables"):
        check_plan(plan, rows, LENGTHS)
    with pytest.raises(IntegrityError, match="another row's pages"):
        check_plan(plan, rows, LENGTHS, tables)
    tables[200:202] = tables[0:2]
    check_plan(plan, rows, LENGTHS, tables)
    check_plan(plan, rows, LENGTHS + np.int32(300), tables)
    with pytest.raises(IntegrityError, match="wrong column"):
        check_plan(plan, UNEVEN, LENGTHS, tables)


def parts_of(plan: WorkPlan, rows: DecodeRows) -> np.ndarray:
    where = plan.entries["row"], plan.task_layer, plan.tasks["head"]
    cell = np.ravel_multi_index(where, rows.table.shape)
    return np.bincount(cell, minlength=rows.table.size).reshape(rows.table.shape)


def test_aot_follows_the_papers_formula() -> None:
    rows = make_rows(np.array([[[800.0, 300.0, 100.0]]]))
    plan = plan_aot(rows, 2, tasks_per_worker=4)
    assert parts_of(plan, rows).tolist() == [[[5, 2, 1]]]
    assert plan.tasks["head"].tolist() == [0, 0, 0, 0, 0, 1, 1, 2]  # the largest share starts first


def test_no_part_of_an_aot_plan_is_smaller_than_asked_for() -> None:
    rows = make_rows(np.array([[[800.0, 300.0, 100.0]]]))
    assert parts_of(plan_aot(rows, 2, min_tokens=200), rows).tolist() == [[[4, 1, 1]]]


def test_aot_hardly_splits_a_batch_that_fills_the_workers() -> None:
    rows = make_rows(np.full((8, 2, 3), 1000.0))
    assert (parts_of(plan_aot(rows, 2), rows) == 1).all()
    assert (
        parts_of(
            plan_aot(make_rows(np.full((1, 2, 3), 1000.0)), 2),
            make_rows(np.full((1, 2, 3), 1000.0)),
        )
        > 1
    ).all()


@pytest.mark.parametrize("budget", [[1.0, 1.0, 1.0], [1.0, 0.2, 0.1], [0.4, 0.35, 0.3]])
@pytest.mark.parametrize("workers", [2, 4])
def test_aot_balances_heads_whose_lengths_follow_their_budgets(
    budget: list[float], workers: int
) -> None:
    rows = make_rows(np.array([[budget]]) * 16384)
    begin, end = plan_aot(rows, workers).spans((np.array(budget) * 16384).astype(np.int32))
    finish_at = [0] * workers
    for tokens in end - begin:  # each task goes to the worker that is free first
        heapq.heapreplace(finish_at, finish_at[0] + int(tokens))
    assert max(finish_at) <= 1.25 * sum(finish_at) / workers


def test_window_layers_are_read_by_window_and_never_split() -> None:
    rows = make_rows(np.full((1, 2, 1), 1000.0), (None, 100))
    plan = plan_aot(rows, 4)
    begin, end = plan.spans(np.array([1000, 1000], np.int32), plan.of_layer(1))
    assert (begin.tolist(), end.tolist()) == ([900], [1000])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 1, "tasks_per_worker": 0}, "tasks_per_worker"),
        ({"workers": 1, "tile_tokens": 40}, "tile_tokens"),
        ({"workers": 1, "tile_tokens": 0}, "tile_tokens"),
    ],
)
def test_wrong_planner_arguments_are_refused_by_name(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        plan_aot(UNEVEN, **arguments)


def test_rows_of_mixed_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[R, L, H\]"):
        replace(UNEVEN, budget=np.ones((1, 1, 2)))
    with pytest.raises(ConfigError, match="windows"):
        replace(UNEVEN, windows=(None, None))
    with pytest.raises(ConfigError, match=r"\brow\b"):
        make_rows(np.ones((0, 1, 2)))


@pytest.mark.parametrize("rows", [33, 40, 48, 64])
def test_about_as_many_heads_as_workers_are_cut_so_that_the_long_ones_delay_nobody(
    rows: int,
) -> None:
    """Half of the heads hold a third of what the others hold; heads that are all alike
    stay whole.
    """
    workers, shape = 396, (rows, 1, 8)
    lengths = np.broadcast_to(np.array([6000, 2000] * 4), shape).astype(np.int32).ravel()
    plan = plan_workqueue(make_rows(np.ones(shape)), lengths, Grain(workers))
    begin, end = plan.spans(lengths)
    finished = [0] * workers
    for tokens in end - begin:  # in the order they start
        heapq.heapreplace(finished, finished[0] + int(tokens))
    assert max(finished) < 1.6 * lengths.sum() / workers
    alike = plan_workqueue(
        make_rows(np.ones(shape)), np.full(lengths.shape, 4000, np.int32), Grain(workers)
    )
    assert alike.direct.all()


@pytest.mark.parametrize(("rows", "tokens", "tasks"), [(40, 16384, 960), (1, 16384, 392)])
def test_fewer_heads_than_workers_are_cut_finer_where_their_tasks_stay_long(
    rows: int, tokens: int, tasks: int
) -> None:
    lengths = np.full((rows, 1, 8), tokens, np.int32)
    plan = plan_workqueue(
        make_rows(np.ones(lengths.shape)), lengths.ravel(), Grain(396, finer=True)
    )
    begin, end = plan.spans(lengths.ravel())
    assert len(begin) == tasks
    assert (end - begin).max() - (end - begin).min() <= plan.tile_tokens
