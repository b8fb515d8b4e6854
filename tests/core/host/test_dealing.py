"""Heads are dealt to ranks so that ranks are alike, whatever the budgets are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rank_deal import count_numbers
from tangram.compress.dealing import (
    check_ranks,
    consecutive_heads,
    deal_heads,
    heads_of_rank,
    rank_heads,
)
from tangram.errors import ConfigError
from tangram.types import Int64
from tests.examples import examples


@st.composite
def kept_pages(draw: st.DrawFn) -> tuple[Int64, int]:
    """Pages [L, H] that heads keep of a chunk, and a number of ranks that divides H."""
    ranks, share, layers = (draw(st.integers(1, most)) for most in (4, 3, 5))
    row = st.lists(st.integers(1, 32), min_size=ranks * share, max_size=ranks * share)
    pages = draw(st.lists(row, min_size=layers, max_size=layers))
    return np.asarray(pages, np.int64), ranks


@settings(max_examples=examples(80), deadline=None)
@given(kept_pages())
def test_every_rank_gets_as_many_heads_of_a_layer_and_each_head_goes_to_one(
    case: tuple[Int64, int],
) -> None:
    pages, ranks = case
    order = deal_heads(pages, ranks)
    assert (np.sort(order, axis=1) == consecutive_heads(*pages.shape)).all()
    assert (order == deal_heads(pages, ranks)).all(), "ranks deal alike without asking each other"


@settings(max_examples=examples(80), deadline=None)
@given(kept_pages())
def test_no_deal_takes_fewer_numbers(case: tuple[Int64, int]) -> None:
    """At each place of the ranks' lists, N times as many heads are at least as deep: some rank has
    a head there that is no less deep than the one behind them.
    """
    pages, ranks = case
    deepest_first = -np.sort(-pages, axis=None)
    assert count_numbers(pages, deal_heads(pages, ranks), ranks) == deepest_first[::ranks].sum()


@settings(max_examples=examples(80), deadline=None)
@given(kept_pages())
def test_numbers_are_those_of_the_deepest_head_at_each_place(case: tuple[Int64, int]) -> None:
    pages, ranks = case
    order, layers = deal_heads(pages, ranks), [2 * layer for layer in range(len(pages))]
    listed = rank_heads(pages, order, layers, ranks)
    for rank, heads in enumerate(listed):
        own = heads_of_rank(order, rank, ranks)
        assert len({head for head, _ in heads}) == own.size
        for (layer, head), kept in heads:
            assert pages[layer // 2, own[layer // 2, head]] == kept
    places = zip(*listed, strict=True)
    deepest = sum(max(kept for _, kept in place) for place in places)
    assert deepest == count_numbers(pages, order, ranks)


def test_two_deep_heads_are_parted() -> None:
    """The example of `deal_heads`."""
    pages = np.array([[4, 4, 1, 1]])
    assert count_numbers(pages, consecutive_heads(1, 4), 2) == 8
    assert count_numbers(pages, deal_heads(pages, 2), 2) == 5


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3.*\b8\b.*1 or 2 or 4"):
        check_ranks(8, 3)
