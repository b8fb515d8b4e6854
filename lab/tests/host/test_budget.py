"""The search for the longest text: it never overshoots, wastes next to nothing, and tokenizes
little.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import ConfigError
from tangram_lab.accuracy.budget import Budget, Stock


def count_words(text: str) -> int:
    return len(text.split())


def writer(sizes: list[int]) -> list[str]:
    """Texts of 0, 1, 2, ... units, whose sizes in words come round again and again."""
    words = itertools.accumulate(itertools.cycle(sizes), initial=0)
    return ["w " * length for length in itertools.islice(words, 1_200)]


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    limit=st.integers(1, 1_000),
    data=st.data(),
)
def test_filled_to_98_percent_or_to_the_last_unit_that_fits(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    texts = writer(sizes)
    fewest = data.draw(st.integers(0, 5).filter(lambda count: count_words(texts[count]) <= limit))
    units = Budget(count_words, limit).fill(texts.__getitem__, fewest=fewest)
    assert units >= fewest
    assert count_words(texts[units]) <= limit
    assert count_words(texts[units]) >= 0.98 * limit or count_words(texts[units + 1]) > limit


def test_a_text_that_cannot_fit_is_refused_with_the_length_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"context_tokens is 10, .* 30"):
        Budget(count_words, 10).fill(lambda units: "w " * (30 + units))


def test_a_tokenizer_that_sees_no_growth_ends_the_search() -> None:
    assert Budget(lambda text: 1, 50).fill(lambda units: "w" * units) == 50


def test_a_long_text_is_tokenized_a_few_times_only() -> None:
    lengths: list[int] = []

    def counting(text: str) -> int:
        lengths.append(len(text))
        return count_words(text)

    sizes = [1 + (7 * index) % 23 for index in range(23)]
    texts = writer(sizes)
    Budget(counting, 10_000).fill(texts.__getitem__)
    assert sum(lengths) <= 4 * 2 * 10_000
    assert len(lengths) <= 8


def test_a_longer_stock_continues_a_shorter_one() -> None:
    stock = Stock(itertools.count())
    assert stock.first(3) == [0, 1, 2]
    assert stock.first(5) == [0, 1, 2, 3, 4]
    assert stock.first(2) == [0, 1]
