"""Prefix packing: rows that share pages read them once, and only they; what is packed
is what pays.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import ConfigError, IntegrityError
from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.packing import plan_packing
from tangram.plan.profit import THRIFT
from tangram.plan.records import RangeKind
from tangram.plan.workqueue import Grain
from tangram.types import Int32
from tangram_lab.baselines.packing_rules import ALL_PACKING_RULES
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tests.core.host.planning import PAGE, SharedBatch, shared_batch, shared_batches
from tests.mentions import mentioning

RULES = tuple(ALL_PACKING_RULES)
WHOLE = 1 << 40  # min_tokens so large that nothing is cut
costs = st.builds(
    CostModel,
    partial_bytes_per_us=st.floats(4, 7).map(lambda x: 10**x),
    task_us=st.sampled_from([1e-3, 0.5, 50.0]),
    flops_per_us=st.sampled_from([1e6, 4e8]),
    head_dim=st.sampled_from([64, 128]),
)


def pack(batch: SharedBatch, rule: str = "naive", workers: int = 4, **options: object) -> WorkPlan:
    grain = {
        field.name: options.pop(field.name) for field in fields(Grain) if field.name in options
    }
    return plan_packing(
        batch.rows,
        batch.lengths,
        batch.forest,
        batch.kept_tokens,
        Grain(workers, **grain),  # type: ignore[arg-type]
        **{"group": 4, "cost": CostModel(), "rule": ALL_PACKING_RULES[rule], **options},  # type: ignore[arg-type]
    )


def tasks(plan: WorkPlan) -> set[tuple[tuple[int, ...], int, int, int]]:
    """(rows, kind, a, b) of every task."""
    return {
        (tuple(sorted(plan.entries["row"][begin:end].tolist())), kind, a, b)
        for _, _, _, _, kind, a, b, begin, end, _ in plan.tasks.tolist()
    }


@given(
    shared_batches(),
    st.sampled_from(RULES),
    st.sampled_from([1, 7, 132]),
    st.sampled_from([4, 8, 128]),
    costs,
)
def test_every_rule_covers_every_entry_once_and_survives_growth(
    batch: SharedBatch, rule: str, workers: int, max_query_rows: int, cost: CostModel
) -> None:
    for tile, least in ((16, 1), (64, 256)):
        plan = pack(
            batch,
            rule,
            workers,
            max_query_rows=max_query_rows,
            cost=cost,
            tile_tokens=tile,
            min_tokens=least,
        )
        for grown_tokens in (0, 1, 300):
            check_plan(plan, batch.rows, batch.lengths + np.int32(grown_tokens), batch.tables)
        assert plan.rows_served.max() <= max_query_rows // 4


@given(shared_batches(windows=False))
def test_the_check_sees_rows_served_with_pages_of_others(batch: SharedBatch) -> None:
    plan = pack(batch)
    several = np.flatnonzero(plan.rows_served > 1)
    if not len(several):
        return
    task = several[0]
    layer, one = plan.task_layer[task], plan.tasks[task]
    tables = batch.tables.copy()
    table = batch.rows.table[one["first"]["row"], layer, one["head"]]
    tables[table + one["a"] // PAGE] += 10_000
    with pytest.raises(IntegrityError, match=mentioning("row's pages")):
        check_plan(plan, batch.rows, batch.lengths, tables)


def plan_us(cost: CostModel, plan: WorkPlan, lengths: Int32, group: int) -> float:
    """All layers of a plan at `lengths`: entries read, task starts and partial results."""
    begin, end = plan.spans(lengths)
    readers = plan.rows_served
    reading = float(((end - begin) * cost.token_us(readers * group)).sum())
    partials = int((~plan.direct).sum()) * cost.partial_us(group)
    return reading + len(readers) * cost.start_us + partials


@given(shared_batches(), costs, st.sampled_from([4, 16, 128]))
def test_the_measured_rule_never_costs_more_than_off_or_naive(
    batch: SharedBatch, cost: CostModel, max_query_rows: int
) -> None:
    us = {
        rule: plan_us(
            cost,
            pack(batch, rule, cost=cost, max_query_rows=max_query_rows, min_tokens=WHOLE),
            batch.lengths,
            4,
        )
        for rule in RULES
    }
    assert us["measured"] <= min(us["off"], us["naive"]) * (1 + 1e-9)


def least_us(batch: SharedBatch, cost: CostModel, most_rows: int, group: int) -> float:
    """The least cost of one layer's one head over all sets of nodes that may be packed, in plain
    loops.
    """
    forest, kept = batch.forest, int(batch.kept_tokens[0, 0])
    position = {int(row): place for place, row in enumerate(forest.order)}

    def tokens(units: int, row: int) -> int:
        sealed = min(units, int(forest.sealed_units[row]))
        return sealed * kept + (units - sealed) * PAGE

    def us(packed: tuple[int, ...]) -> float:
        total, partials = 0.0, 0
        begin = dict.fromkeys(position, 0)  # of what each row has yet to read
        own = dict.fromkeys(position, True)
        for node in sorted(packed):
            rows = [
                row
                for row, place in position.items()
                if forest.row_begin[node] <= place < forest.row_end[node]
            ]
            end = tokens(int(forest.unit_end[node]), rows[0])
            for chunk in range(0, len(rows), most_rows):
                served = len(rows[chunk : chunk + most_rows])
                total += cost.start_us + (end - begin[rows[0]]) * float(
                    cost.token_us(np.array(served * group))
                )
            for row in rows:
                partials += 2 if own[row] else 1
                begin[row], own[row] = end, False
        for row, length in enumerate(batch.lengths):
            total += cost.start_us + (int(length) - begin[row]) * float(
                cost.token_us(np.array(group))
            )
        return total + partials * cost.partial_us(group)

    nodes = range(forest.nodes)
    return min(
        us(packed) for count in range(forest.nodes + 1) for packed in combinations(nodes, count)
    )


@given(shared_batches(windows=False, layers=1, heads=1), costs, st.sampled_from([1, 2, 32]))
def test_the_measured_rule_costs_the_least_of_all_ways_to_pack(
    batch: SharedBatch, cost: CostModel, most_rows: int
) -> None:
    plan = pack(batch, "measured", cost=cost, max_query_rows=4 * most_rows, min_tokens=WHOLE)
    assert plan_us(cost, plan, batch.lengths, 4) == pytest.approx(
        least_us(batch, cost, most_rows, 4), rel=1e-9
    )


KEPT = np.array([[4]])
# Rows 0 and 2 share two sealed chunks (128 entries) and then, with row 4, nothing; row 1 and 3
# share three units.
TWO_ROOTS = shared_batch(
    [(1, 2), (5, 6, 7), (1, 2, 3), (5, 6, 7), (9,)], [2, 1, 2, 1, 1], [100, 9, 20, 0, 40], KEPT
)


@given(shared_batches(windows=False, layers=1, heads=1), costs, st.sampled_from([1, 2, 32]))
def test_the_thrifty_rule_packs_where_that_spares_enough(
    batch: SharedBatch, cost: CostModel, most_rows: int
) -> None:
    """What is read with and without packing is counted in the plans themselves."""
    options = {"cost": cost, "max_query_rows": 4 * most_rows, "min_tokens": WHOLE}
    plans = {rule: pack(batch, rule, **options) for rule in ("off", "measured", "thrifty")}
    read = {
        rule: int(np.subtract(*plan.spans(batch.lengths)[::-1]).sum())
        for rule, plan in plans.items()
    }
    worth = (
        read["off"] - read["measured"] >= read["off"] * THRIFT and read["measured"] < read["off"]
    )
    assert tasks(plans["thrifty"]) == tasks(plans["measured" if worth else "off"])


def test_naive_packs_every_node_of_several_roots_and_rows_that_are_not_neighbours() -> None:
    assert tasks(pack(TWO_ROOTS, min_tokens=WHOLE)) == {
        ((0, 2), RangeKind.ABS, 0, 128),
        ((1, 3), RangeKind.ABS, 0, 96),
        ((0,), RangeKind.OPEN, 128, 0),
        ((2,), RangeKind.OPEN, 128, 0),
        ((1,), RangeKind.OPEN, 96, 0),
        ((3,), RangeKind.OPEN, 96, 0),
        ((4,), RangeKind.OPEN, 0, 0),
    }


def test_off_packs_nothing() -> None:
    plan = pack(TWO_ROOTS, "off", min_tokens=WHOLE)
    assert tasks(plan) == {((row,), RangeKind.OPEN, 0, 0) for row in range(5)} and plan.direct.all()


def test_rows_beyond_the_largest_tile_are_served_by_further_tasks() -> None:
    batch = shared_batch([(1,)] * 5, [1] * 5, [10] * 5, KEPT)
    plan = pack(batch, max_query_rows=8, min_tokens=WHOLE)
    assert sorted(plan.rows_served)[-3:] == [1, 2, 2]
    assert (plan.tasks["kind"] == RangeKind.ABS).sum() == 3


# A root of 64 entries with 2 + 20 rows below: node (1, 2) of 2 rows, node (1, 3) of 20 rows.
UNEVEN = shared_batch([(1, 2)] * 2 + [(1, 3)] * 20, [2] * 22, [30] * 22, KEPT)


def test_the_papers_rule_merges_a_node_into_children_of_many_rows_only() -> None:
    """4 · 2 ≤ 64: the pair keeps the root apart; 4 · 20 > 64: the others read it themselves."""
    many = tuple(range(2, 22))
    wanted = {
        ((0, 1), RangeKind.ABS, 0, 64),
        ((0, 1), RangeKind.ABS, 64, 128),
        (many, RangeKind.ABS, 0, 128),
    }
    found = tasks(pack(UNEVEN, "paper", min_tokens=WHOLE, max_query_rows=128))
    assert {task for task in found if task[1] == RangeKind.ABS} == wanted
    assert {task[2] for task in found if task[1] == RangeKind.OPEN} == {128}


def test_a_node_that_does_not_pay_is_read_in_front_of_its_children() -> None:
    """Partial results that cost more than all entries together: nothing is packed. Free ones: every
    node is.
    """
    dear, free = (
        CostModel(partial_bytes_per_us=1.0),
        CostModel(partial_bytes_per_us=1e12, task_us=1e-9),
    )
    assert tasks(pack(UNEVEN, "measured", cost=dear, min_tokens=WHOLE)) == tasks(
        pack(UNEVEN, "off", min_tokens=WHOLE)
    )
    assert tasks(pack(UNEVEN, "measured", cost=free, min_tokens=WHOLE)) == tasks(
        pack(UNEVEN, min_tokens=WHOLE)
    )


def test_sliding_window_layers_are_read_row_by_row() -> None:
    batch = shared_batch([(1, 2)] * 3, [1] * 3, [10] * 3, np.full((2, 1), 4), (None, 50))
    plan = pack(batch)
    inside = plan.of_layer(1)
    assert plan.tasks["kind"][inside].tolist() == [RangeKind.WINDOW] * 3
    assert plan.rows_served[plan.of_layer(0)].max() == 3


def test_long_prefixes_and_tails_are_cut_so_that_tasks_are_alike() -> None:
    batch = shared_batch(
        [tuple(range(64))] * 4, [64] * 4, [4000, 100, 100, 100], KEPT, grow_pages=300
    )
    plan = pack(batch, workers=8, tasks_per_worker=2, tile_tokens=16, min_tokens=64)
    begin, end = plan.spans(batch.lengths)
    target = (64 * 64 + 4000 + 300) / 16
    assert (end - begin).max() <= 1.35 * target and 14 <= len(begin) <= 16
    assert (np.diff(np.sort(end - begin)[3:]) <= 64).all()


def test_a_span_is_cut_by_what_its_rows_make_of_it() -> None:
    """Where arithmetic decides, 8 rows · G 4 take twice what one row padded to 16 takes: twice as
    many tasks.
    """
    batch = shared_batch([tuple(range(64))] * 8, [64] * 8, [4096] * 8, KEPT, grow_pages=300)
    cost = CostModel(flops_per_us=1e6)
    plan = pack(batch, cost=cost, workers=8, tasks_per_worker=16, tile_tokens=16, min_tokens=16)
    begin, end = plan.spans(batch.lengths)
    several = plan.rows_served > 1
    assert (end - begin)[~several].mean() == pytest.approx(
        2 * (end - begin)[several].mean(), rel=0.1
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group": 0}, "group"),
        ({"max_query_rows": 3}, "max_query_rows"),
        ({"workers": 0}, "workers"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"tile_tokens": 40}, "tile_tokens"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        pack(TWO_ROOTS, **options)  # type: ignore[arg-type]


def test_a_cost_model_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("head_dim 0")):
        CostModel(head_dim=0)
