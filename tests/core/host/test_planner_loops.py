"""Compiled planning equals planning in plain loops, task by task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.loops import sort_longest
from tangram.plan.rehearsal import rehearse_planning
from tangram.plan.split import Sources, fit_parts
from tangram.plan.workqueue import Grain, cut
from tangram.types import Float64, Int32
from tests.core.host.plain_plans import PlainLayer, cut_plainly, fit_plainly, order_plainly


@dataclass(frozen=True)
class Cut:
    """What `cut` takes; shared sources need not be prefixes."""

    rows: DecodeRows
    sources: Sources
    begin: Int32
    end: Int32
    weight: Float64
    grain: Grain


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Up to 6 rows, and up to 4 spans that any of them share."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)))
    shared = draw(st.lists(st.sets(st.integers(0, shape[0] - 1), min_size=1), max_size=4))
    readers = [*(sorted(rows) for rows in shared), *([row] for row in range(shape[0]))]
    sources = Sources(
        np.array([rows[0] for rows in readers]),
        np.append(0, np.cumsum([len(rows) for rows in readers])),
        np.concatenate(readers),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = shape[1], len(readers), shape[2]
    begin = rng.integers(0, 300, sizes).astype(np.int32)
    longest = draw(st.sampled_from([1, 40, 900, 20_000]))
    end = begin + rng.integers(0, longest, sizes).astype(np.int32)
    place, column, index = rng.integers(0, 1000, (3, *shape))
    windows = draw(
        st.lists(st.sampled_from([None, None, 50]), min_size=shape[1], max_size=shape[1])
    )
    return Cut(
        DecodeRows.of(place, column, index, np.ones(shape), tuple(windows), 16),
        sources,
        begin,
        end,
        1 + rng.integers(0, 3, len(readers)) / 4,
        Grain(
            draw(st.sampled_from([1, 3, 20, 132])),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([16, 64])),
            draw(st.sampled_from([1, 128])),
            draw(st.booleans()),
        ),
    )


def list_layers(plan: WorkPlan) -> list[PlainLayer]:
    """The layers of `plan`, in the form of the plain loops."""
    layers = []
    for layer in range(plan.layers):
        tasks = plan.tasks[plan.of_layer(layer)].tolist()
        entries = [
            [
                (row, bool(direct), slot)
                for row, direct, slot, _ in plan.entries[task[7] : task[8]].tolist()
            ]
            for task in tasks
        ]
        segments = [(a, b, c, d) for a, b, c, d in plan.segments[plan.merges(layer)].tolist()]
        layers.append(PlainLayer([tuple(task[:7]) for task in tasks], entries, segments))
    return layers


@given(cuts())
def test_tasks_entries_and_merges_are_those_of_plain_loops(one: Cut) -> None:
    """All of them in their order: the same plan, not only one that reads the same entries."""
    given_to = one.rows, one.sources, one.begin, one.end, one.weight, one.grain
    plan = cut(*given_to)
    assert list_layers(plan) == cut_plainly(*given_to)
    assert (plan.tasks["first"] == plan.entries[plan.tasks["row_begin"]]).all()
    most = max((end for *_, end in plan.segments.tolist()), default=0)
    assert plan.partial_slots == most


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.floats(0.5, 1e5),
    st.integers(1, 60),
    st.floats(0, 50),
)
def test_parts_fit_as_in_plain_loops(
    size: list[float], target: float, wanted: int, most: float
) -> None:
    found = fit_parts(np.array([[size]]), np.full((1, 1, 1), target), wanted, np.floor(most))
    limits = [float(np.floor(most))] * len(size)
    assert found.ravel().tolist() == fit_plainly(size, target, wanted, limits)


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 7.0, 1e5]) | st.floats(0, 1e5), min_size=1))
def test_cells_are_sorted_as_in_plain_loops(size: list[float]) -> None:
    key, spare, order = (np.empty(len(size), dtype) for dtype in (np.uint16, np.uint32, np.uint32))
    sort_longest(np.array(size), key, spare, order)
    assert order.tolist() == order_plainly(size)


def test_a_rehearsal_shares_splits_and_merges() -> None:
    """So whoever has packed its plan has compiled every loop."""
    plan, _ = rehearse_planning()
    assert plan.rows_served.max() == 2
    assert len(plan.segments)
