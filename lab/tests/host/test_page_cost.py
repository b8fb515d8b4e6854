"""The interval that `bench.page_cost` publishes beside a median."""

from __future__ import annotations

import pytest

from bench.page_cost import describe, find_interval


@pytest.mark.parametrize(
    ("count", "below"), [(6, 1), (9, 2), (10, 2), (20, 6), (36, 12), (100, 40)]
)
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, below: int) -> None:
    """Ranks as tables of the sign test have them, for at least 95 %."""
    values = list(range(count, 0, -1))
    assert find_interval(values) == (below, count + 1 - below)


def test_too_few_values_have_their_range() -> None:
    assert find_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_each_pair_is_compared_with_itself() -> None:
    found = describe([1.0, 2.0, 4.0], [1.1, 2.0, 4.4])
    assert found["more"] == pytest.approx(0.1) and found["more_each"] == [0.1, 0.0, 0.1]
