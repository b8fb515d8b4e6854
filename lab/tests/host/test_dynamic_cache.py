"""The cache that allocates chunks whole: between steps it holds what reserved budgets hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.accounting import check_accounting
from tangram.cache.layout import Layout
from tangram.errors import IntegrityError
from tangram.types import Int64
from tangram_lab.baselines.caches import DynamicCache
from tests.host.device_double import NumberedCache, layout, layout_sets, retentions


class NumberedDynamicCache(NumberedCache, DynamicCache):
    """A dynamic cache whose tests name retentions by their number."""


def find_kept(entry: Layout) -> Int64:
    return entry.head_kept_tokens[list(entry.geometry.full_layers)].ravel().astype(np.int64)


def dynamic(entry: Layout, pages: int) -> NumberedDynamicCache:
    return NumberedDynamicCache(
        retentions(entry), total_pages=pages, max_sequences=8, prefix_caching=True
    )


def free(cache: NumberedDynamicCache) -> int:
    """Pages that nobody holds, cached ones included."""
    return cache.ledger.free + cache.prefix.idle_pages


@settings(max_examples=50, deadline=None)
@given(layouts=layout_sets(count=1), length=st.integers(1, 48))
def test_a_pool_that_holds_the_promise_holds_every_chunk_whole(
    layouts: list[Layout], length: int
) -> None:
    entry, tokens = layouts[0], np.arange(length)
    cache = dynamic(entry, entry.most_pages(length))
    seq = cache.enter(0, "", tokens, length)
    assert seq is not None
    for _ in range(length // entry.chunk_tokens):
        had, spare = free(cache), cache.spare_pages
        cache.seal(seq)
        taken = entry.chunk_pages * len(entry.groups)
        assert free(cache) == had - taken and cache.spare_pages >= spare
        if not entry.keeps_everything:
            cache.reclaim(seq.slot, find_kept(entry))
        assert free(cache) == had - entry.span_pages
        cache.commit(seq, tokens)
        check_accounting(cache)
    cache.grow(seq, length % entry.chunk_tokens)
    check_accounting(cache)
    assert seq.held_pages == entry.count_held_pages(*divmod(length, entry.chunk_tokens))


def test_counts_that_no_layout_promised_are_refused() -> None:
    entry = layout(1)
    cache = dynamic(entry, 100)
    seq = cache.enter(0, "", np.arange(20), 20)
    assert seq is not None
    cache.seal(seq)
    with pytest.raises(IntegrityError, match="kept other counts than its layout says"):
        cache.reclaim(seq.slot, find_kept(entry) + 1)


def test_what_is_not_given_back_is_missed() -> None:
    cache = dynamic(layout(1), 100)
    seq = cache.enter(0, "", np.arange(20), 20)
    assert seq is not None
    cache.seal(seq)
    with pytest.raises(IntegrityError, match="pages are miscounted"):
        check_accounting(cache)
