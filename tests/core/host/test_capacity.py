"""How many tokens fit: what is promised is admitted to the last chunk, and no chunk more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.accounting import check_accounting
from tangram.cache.layout import Layout
from tangram.sizing.cache_size import kv_size
from tests.core.host.device_double import NumberedCache, geometry, layout, layout_sets, retentions
from tests.core.host.test_cache import compute, tokens_of

FEW = settings(max_examples=60, deadline=None)
ONE = layout_sets(count=1).map(lambda built: built[0])


def charge_every_chunk(layout: Layout, pages: int) -> int:
    """Tokens that fit if a window's part stayed for every sealed chunk."""
    return pages * layout.chunk_tokens // layout.span_pages


def check_filled(layout: Layout, pages: int, length_tokens: int) -> None:
    """As many tokens as fit are held side by side, and one more chunk is refused."""
    chunk = layout.chunk_tokens
    length = max(1, length_tokens // chunk) * chunk
    whole, rest = divmod(layout.tokens_in(pages, length_tokens), length)
    begun = rest // chunk * chunk
    cache = NumberedCache(
        retentions(layout), total_pages=pages, max_sequences=whole + 2, prefix_caching=False
    )
    for number, tokens in enumerate([length] * whole + [begun] * (begun > 0)):
        seq = cache.enter(0, "", tokens_of(tokens, number), tokens)
        assert seq is not None
        compute(cache, seq, tokens_of(tokens, number))
        check_accounting(cache)
    assert sum(seq.computed_tokens for seq in cache.sequences.values()) == whole * length + begun
    if begun:
        cache.close(seq)
    assert cache.enter(0, "", tokens_of(begun + chunk), begun + chunk) is None


@FEW
@given(ONE, st.integers(1, 120), st.integers(1, 48))
def test_the_pool_admits_the_tokens_that_fit_and_not_a_chunk_more(
    layout: Layout, pages: int, length_tokens: int
) -> None:
    check_filled(layout, pages, length_tokens)


@FEW
@given(ONE, st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_length_matters_only_to_windows(layout: Layout, pages: int, length_tokens: int) -> None:
    found, charged = layout.tokens_in(pages, length_tokens), charge_every_chunk(layout, pages)
    assert found == charged if layout.window_chunks == 0 else found >= charged
    if length_tokens < 2 * layout.chunk_tokens:  # the windows of one chunk are all of it
        assert found == charged


@FEW
@given(ONE, st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
def test_whole_sequences_and_memory_only_add_tokens(
    layout: Layout, pages: int, chunks: int, more: int
) -> None:
    length = chunks * layout.chunk_tokens
    found = layout.tokens_in(pages, length)
    assert found // length == pages // layout.count_promised_pages(length, length)
    assert found <= layout.tokens_in(pages + more, length)


def test_a_windows_part_is_not_charged_to_every_chunk() -> None:
    """Each chunk of a windowed layer was charged, so that half of the tokens were missing."""
    windowed = layout(4, model=geometry(2, 2, (None, 3)))
    assert (windowed.full_span_pages, windowed.window_span_pages) == (4, 4)
    # 12 chunks are promised 12 · 4 full pages and 2 · 4 of the window, one of them while sealing.
    assert windowed.count_promised_pages(96, 96) == 56
    assert windowed.tokens_in(112, 96) == 2 * 96
    assert charge_every_chunk(windowed, 112) == 112
    check_filled(windowed, 112, 96)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-12b"])
def test_tokens_and_sequences_that_fit_agree(model: str) -> None:
    for retention in (1.0, 0.5, 0.25):
        size = kv_size(model, 32_768, retention=retention)
        tokens = size.capacity_tokens(24)
        # To their end they need a raw chunk besides, which a full cache takes anyway.
        whole = tokens // 32_768
        assert whole == size.how_many_fit(24) if retention == 1 else whole >= size.how_many_fit(24)


def test_a_quarter_of_gpt_oss_holds_more_than_three_times_as_many_tokens() -> None:
    """The layers with windows of 128 tokens do not dilute what is dropped."""
    full, quarter = (kv_size("gpt-oss-20b", 40_960, retention=rho) for rho in (1.0, 0.25))
    assert quarter.capacity_tokens(24) > 3.5 * full.capacity_tokens(24)
