"""Groups and page counts: the ρ promise, no waste, and fairness, whatever the budgets."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tangram.compress.groups import allot_pages, cluster, compute_realised_retention, group_budgets
from tangram.errors import ConfigError
from tangram_lab.baselines.adjacent_groups import group_adjacent
from tests.mentions import mentioning

PAGE_TOKENS = 16


@st.composite
def allotments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `allot_pages` for which ρ can be met, short groups included."""
    heads_per_page = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, heads_per_page), min_size=1, max_size=24))
    budget = st.one_of(st.just(0.0), st.floats(0.0, 1.0))
    chunk_pages = draw(st.integers(1, 32))
    min_pages = draw(st.integers(1, max(1, chunk_pages // 4)))
    smallest = Fraction(min_pages * len(sizes) * heads_per_page, sum(sizes) * chunk_pages)
    assume(smallest < Fraction(99, 100))
    retention = draw(st.integers(math.ceil(smallest * 1000), 999)) / 1000
    return {
        "budgets": draw(st.lists(budget, min_size=len(sizes), max_size=len(sizes))),
        "group_sizes": sizes,
        "chunk_tokens": chunk_pages * PAGE_TOKENS,
        "page_tokens": PAGE_TOKENS,
        "heads_per_page": heads_per_page,
        "retention": retention,
        "min_pages": min_pages,
    }


def footprint(pages: list[int], case: dict[str, Any]) -> Fraction:
    """Share of the chunk's true entries that the pages occupy, exactly."""
    entries = sum(case["group_sizes"]) * case["chunk_tokens"]
    return Fraction(sum(pages) * case["heads_per_page"] * PAGE_TOKENS, entries)


@given(allotments())
def test_footprint_keeps_the_promise_and_leaves_no_usable_page(case: dict[str, Any]) -> None:
    pages = allot_pages(**case)
    allowed = Fraction(str(case["retention"]))
    one_page = Fraction(
        case["heads_per_page"] * PAGE_TOKENS, sum(case["group_sizes"]) * case["chunk_tokens"]
    )
    most = case["chunk_tokens"] // PAGE_TOKENS
    assert all(case["min_pages"] <= count <= most for count in pages)
    assert footprint(pages, case) <= allowed
    assert all(count == most for count in pages) or footprint(pages, case) + one_page > allowed


@given(allotments())
def test_a_larger_budget_never_gets_fewer_pages(case: dict[str, Any]) -> None:
    pages = allot_pages(**case)
    ranked = sorted(zip(case["budgets"], pages, strict=True))
    assert all(low <= high for (less, low), (more, high) in pairwise(ranked) if less < more)
    spread: dict[float, set[int]] = {}
    for budget, count in ranked:
        spread.setdefault(budget, set()).add(count)
    assert all(max(counts) - min(counts) <= 1 for counts in spread.values()), (
        "equal budgets, unequal treatment"
    )


@given(allotments(), st.floats(1.0, 4.0))
def test_a_larger_retention_takes_no_page_away(case: dict[str, Any], factor: float) -> None:
    more = {**case, "retention": min(0.999, case["retention"] * factor)}
    assert all(
        less <= greater
        for less, greater in zip(allot_pages(**case), allot_pages(**more), strict=True)
    )


@given(allotments())
def test_only_the_ratios_of_budgets_matter(case: dict[str, Any]) -> None:
    budgets = [round(budget, 3) for budget in case["budgets"]]
    halved = [budget / 2 for budget in budgets]
    assert allot_pages(**{**case, "budgets": budgets}) == allot_pages(**{**case, "budgets": halved})


def test_pages_are_proportional_when_nothing_is_clipped() -> None:
    pages = allot_pages(
        [0.4, 0.3, 0.2, 0.1],
        [4] * 4,
        chunk_tokens=2048,
        page_tokens=16,
        heads_per_page=4,
        retention=0.25,
        min_pages=3,
    )
    assert pages == [51, 38, 26, 13]  # 128 pages in the ratio 4 : 3 : 2 : 1


def test_a_full_group_passes_its_surplus_on() -> None:
    pages = allot_pages(
        [1.0, 0.02, 0.02],
        [1] * 3,
        chunk_tokens=64,
        page_tokens=16,
        heads_per_page=1,
        retention=0.7,
        min_pages=1,
    )
    assert pages == [4, 2, 2]


def test_empty_columns_are_paid_for() -> None:
    """Three heads a group on pages of four columns: a quarter of every page is air, and counts
    against ρ.
    """
    pages = allot_pages(
        [0.5] * 10,
        [3] * 10,
        chunk_tokens=512,
        page_tokens=16,
        heads_per_page=4,
        retention=0.5,
        min_pages=1,
    )
    assert pages == [12] * 10
    realised = compute_realised_retention(
        pages, 30, chunk_tokens=512, page_tokens=16, heads_per_page=4
    )
    assert realised == 0.5


def test_an_impossible_retention_is_refused_with_the_smallest_possible_one() -> None:
    shape = {"chunk_tokens": 512, "page_tokens": 16, "heads_per_page": 4, "min_pages": 2}
    with pytest.raises(ConfigError, match=mentioning("kv_retention 0.05 0.0834")) as refusal:
        allot_pages([0.5] * 4, [3] * 4, retention=0.05, **shape)
    assert "page_tokens" in str(refusal.value)
    assert allot_pages([0.5] * 4, [3] * 4, retention=0.0834, **shape) == [2] * 4


def test_pages_that_no_retention_could_fill_are_refused_by_their_size() -> None:
    """No ratio is proposed that could not be given: it would be over 1."""
    with pytest.raises(
        ConfigError, match=mentioning("heads_per_page 100000 page_tokens 16")
    ) as refusal:
        allot_pages(
            [0.5] * 4,
            [3] * 4,
            chunk_tokens=64,
            page_tokens=16,
            heads_per_page=100_000,
            retention=0.5,
            min_pages=1,
        )
    assert "raise kv_retention" not in str(refusal.value)


@pytest.mark.parametrize("retention", [0.0, 1.0, -0.1, float("nan"), float("inf")])
def test_a_retention_outside_the_open_interval_is_refused(retention: float) -> None:
    with pytest.raises(ConfigError, match="kv_retention"):
        allot_pages(
            [0.5],
            [1],
            chunk_tokens=64,
            page_tokens=16,
            heads_per_page=1,
            retention=retention,
            min_pages=1,
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_tokens": 24}, "chunk_tokens"),
        ({"budgets": [0.5]}, "budgets"),
        ({"budgets": [0.5, float("nan")]}, "budgets"),
        ({"group_sizes": [1, 3]}, "heads_per_page"),
        ({"min_pages": 5}, "min_pages"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    good = {"budgets": [0.5, 0.5], "group_sizes": [2, 2], "chunk_tokens": 64, "page_tokens": 16}
    with pytest.raises(ConfigError, match=named):
        allot_pages(**{**good, "heads_per_page": 2, "retention": 0.5, "min_pages": 1, **change})


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from(["model", "layer"]),
    st.integers(0, 2**32 - 1),
)
def test_every_head_is_in_exactly_one_group(
    layers: int, heads: int, size: int, across: Any, seed: int
) -> None:
    indices = [3 * layer + 1 for layer in range(layers)]
    budgets = np.random.default_rng(seed).random((layers, heads))
    groups = cluster(budgets, indices, size, across)
    assert sorted(head for group in groups for head in group) == [
        (layer, head) for layer in indices for head in range(heads)
    ]
    assert all(1 <= len(group) <= size for group in groups)
    full = layers * -(-heads // size) if across == "layer" else -(-layers * heads // size)
    assert len(groups) == full, "more groups than the heads need"
    if across == "layer":
        assert all(len({layer for layer, _ in group}) == 1 for group in groups)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_groups_hold_neighbours_in_budget_order(
    layers: int, heads: int, size: int, seed: int
) -> None:
    budgets = np.random.default_rng(seed).random((layers, heads))
    groups = cluster(budgets, range(layers), size, "model")
    assert all(
        min(budgets[head] for head in earlier) >= max(budgets[head] for head in later)
        for earlier, later in pairwise(groups)
    )


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_other_grouping_of_whole_pages_is_shallower(
    layers: int, blocks: int, size: int, seed: int
) -> None:
    """Clustering by budget minimises the sum of group maxima; across layers it is never worse than
    within.
    """
    rng = np.random.default_rng(seed)
    budgets = rng.random((layers, blocks * size))
    indices = range(layers)

    def depth(groups: list[Any]) -> float:
        return float(group_budgets(budgets, indices, groups).sum())

    clustered = depth(cluster(budgets, indices, size, "model"))
    within = depth(cluster(budgets, indices, size, "layer"))
    adjacent = depth(cluster(np.ones_like(budgets), indices, size, "layer"))
    heads = [(layer, head) for layer in indices for head in range(blocks * size)]
    shuffled = [heads[index] for index in rng.permutation(len(heads))]
    arbitrary = depth([shuffled[start : start + size] for start in range(0, len(shuffled), size)])
    assert clustered <= min(within, arbitrary) + 1e-9
    assert within <= adjacent + 1e-9


def test_ties_keep_the_natural_order_and_layers_keep_their_own_index() -> None:
    groups = cluster(np.full((2, 3), 0.5), [5, 11], 4, "model")
    assert groups == [((5, 0), (5, 1), (5, 2), (11, 0)), ((11, 1), (11, 2))]


@pytest.mark.parametrize(
    ("budgets", "size", "across", "named"),
    [
        ([0.1, 0.2], 2, "model", "budgets"),
        ([[0.1, -0.2]], 2, "model", "budgets"),
        ([[0.1, float("nan")]], 2, "layer", "budgets"),
        ([[0.1, 0.2]], 0, "model", "heads_per_page"),
        ([[0.1, 0.2]], 2, "rank", "grouping"),
    ],
)
def test_cluster_refuses_what_it_cannot_group(
    budgets: list[Any], size: int, across: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        cluster(budgets, [0], size, across)


@given(
    kv_heads=st.integers(1, 6),
    layers=st.integers(1, 5),
    per_page=st.integers(1, 6),
    coarser=st.integers(1, 6),
    data=st.data(),
)
def test_neighbours_keep_at_least_what_clustering_gave_them(
    kv_heads: int, layers: int, per_page: int, coarser: int, data: st.DataObject
) -> None:
    shape = layers * kv_heads
    budgets = np.array(
        data.draw(st.lists(st.floats(0, 1), min_size=shape, max_size=shape))
    ).reshape(layers, kv_heads)
    groups = cluster(budgets, range(layers), per_page, "model")
    pages = data.draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))
    given_pages = {
        head: count for group, count in zip(groups, pages, strict=True) for head in group
    }
    runs, deepest = group_adjacent(groups, pages, coarser)
    heads = [head for run in runs for head in run]
    assert heads == sorted(given_pages) and all(len(run) == coarser for run in runs[:-1])
    assert deepest == [max(given_pages[head] for head in run) for run in runs]


def test_a_run_of_all_heads_is_a_layer() -> None:
    groups = [((0, 0), (1, 1)), ((1, 0), (0, 1))]
    assert group_adjacent(groups, [3, 1], 2) == ([((0, 0), (0, 1)), ((1, 0), (1, 1))], [3, 3])
    assert group_adjacent(groups, [3, 1], 1)[1] == [3, 1, 1, 3]
