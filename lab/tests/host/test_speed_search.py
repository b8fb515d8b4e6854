"""The search for the fastest speed that a load is sustained at."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serving.speed_search import MOST_STEPS_OUT, SpeedSearch

SPEEDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4, unique=True).map(sorted)


def run(search: SpeedSearch, limit: float) -> list[float]:
    """The speeds tried with an engine that sustains all up to `limit`."""
    tried: list[float] = []
    while (speed := search.find_next()) is not None:
        tried.append(speed)
        assert len(tried) < 100
        search.note(speed, held=speed <= limit)
    return tried


@given(SPEEDS, st.floats(0.01, 100.0), st.floats(0.01, 0.5))
def test_the_limit_lies_between_two_speeds_as_close_as_was_asked(
    speeds: list[float], limit: float, within: float
) -> None:
    search = SpeedSearch(speeds, within)
    tried = run(search, limit)
    assert len(set(tried)) == len(tried), "a speed is tried twice"
    if search.held is None:
        assert limit < min(tried) <= speeds[0] / 2**MOST_STEPS_OUT
    elif search.failed is None:
        assert limit >= max(tried) >= speeds[-1] * 2**MOST_STEPS_OUT
    else:
        assert search.held <= limit < search.failed <= search.held * (1 + within)
        # Out by doubling, or among what was given; then each trial halves the logarithm of the gap.
        widest = max([2.0, *(b / a for a, b in pairwise(speeds))])
        halvings = math.log2(max(1.0, math.log(widest) / math.log1p(within)))
        assert len(tried) <= len(speeds) + MOST_STEPS_OUT + math.ceil(halvings)


@given(SPEEDS, st.floats(0.01, 100.0))
def test_without_a_search_speeds_are_tried_up_to_the_first_that_fails(
    speeds: list[float], limit: float
) -> None:
    held = [speed for speed in speeds if speed <= limit]
    assert run(SpeedSearch(speeds), limit) == speeds[: len(held) + 1]


@pytest.mark.parametrize(
    ("speeds", "within"),
    [([], None), ([0.0], None), ([2.0, 1.0], None), ([1.0, 1.0], 0.1), ([1.0], 0.0), ([1.0], -1.0)],
)
def test_what_cannot_be_searched_is_refused(speeds: list[float], within: float | None) -> None:
    with pytest.raises(ValueError, match="must"):
        SpeedSearch(speeds, within)
