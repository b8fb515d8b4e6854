"""Footprints are formulas: every one of them against a sequence that is walked token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout, adjacent_groups
from tangram.compress.groups import allot_pages
from tangram.errors import ConfigError
from tests.core.host.device_double import geometry, layout, layout_sets
from tests.examples import examples
from tests.mentions import mentioning

FEW = settings(max_examples=60, deadline=None)
ONE = layout_sets(count=1).map(lambda built: built[0])


class Walk:
    """A sequence that holds pages one by one, as the papers say: sealed chunks, newest windows, a
    raw tail.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.counts = layout.sealed_pages.tolist()
        self.chunks = self.raw_tokens = 0

    @property
    def pages(self) -> int:
        """Pages held between two steps."""
        raw = sum(at % self.layout.page_tokens == 0 for at in range(self.raw_tokens)) * len(
            self.counts
        )
        return self._count_sealed(self.layout.window_chunks) + raw

    def seal(self) -> int:
        """Seal the next chunk; what is held while its queries read the windows before it."""
        self.chunks, self.raw_tokens = self.chunks + 1, 0
        return self._count_sealed(self.layout.window_chunks + 1)

    def _count_sealed(self, window_chunks: int) -> int:
        full, windowed = (
            self.counts[: self.layout.full_groups],
            self.counts[self.layout.full_groups :],
        )
        newest = range(self.chunks)[-window_chunks:] if window_chunks else ()
        return sum(sum(full) for _ in range(self.chunks)) + sum(sum(windowed) for _ in newest)


def walk_decoding(layout: Layout, walk: Walk, tokens: int) -> Iterator[int]:
    """What `walk` holds at every moment as it grows to `tokens` tokens one by one."""
    yield walk.pages
    while walk.chunks * layout.chunk_tokens + walk.raw_tokens < tokens:
        walk.raw_tokens += 1
        yield walk.pages
        if walk.raw_tokens == layout.chunk_tokens:
            yield walk.seal()
            yield walk.pages


def walk_prefill(layout: Layout, walk: Walk, tokens: int) -> Iterator[int]:
    """What `walk` holds at every moment as the whole chunks of `tokens` tokens are sealed."""
    yield walk.pages
    while (walk.chunks + 1) * layout.chunk_tokens <= tokens:
        yield walk.seal()
        yield walk.pages


@FEW
@given(ONE, st.integers(0, 48))
def test_held_and_peak_pages_are_what_a_growing_sequence_holds(layout: Layout, tokens: int) -> None:
    walk = Walk(layout)
    peak = max(walk_decoding(layout, walk, tokens))
    assert layout.count_held_pages(walk.chunks, walk.raw_tokens) == walk.pages
    assert layout.peak_pages(tokens) == peak


@FEW
@given(ONE, st.integers(0, 48), st.integers(0, 48))
def test_a_promise_is_exactly_what_prefill_and_the_rest_of_the_chunk_need(
    layout: Layout, one: int, other: int
) -> None:
    tokens, limit = sorted((one, other))
    walk = Walk(layout)
    most = max(walk_prefill(layout, walk, tokens))
    chunk_end = min(limit, (walk.chunks + 1) * layout.chunk_tokens)
    while walk.chunks * layout.chunk_tokens + walk.raw_tokens < chunk_end:
        walk.raw_tokens += 1
        most = max(most, walk.pages)
    assert layout.count_promised_pages(tokens, limit) == most


@FEW
@given(ONE, st.integers(1, 48))
def test_most_pages_covers_every_promise_on_the_way_and_no_more(layout: Layout, limit: int) -> None:
    promises = [layout.count_promised_pages(tokens, limit) for tokens in range(limit + 1)]
    assert layout.most_pages(limit) == max(promises)


@FEW
@given(ONE, st.integers(0, 48))
def test_uncompressed_entries_counts_what_the_next_token_could_see(
    layout: Layout, tokens: int
) -> None:
    visible = 0
    for window in layout.geometry.windows:
        newest = range(tokens) if window is None else range(max(0, tokens - window), tokens)
        visible += len(newest) * layout.geometry.kv_heads
    assert layout.count_uncompressed_entries(tokens) == visible


@FEW
@given(ONE)
def test_every_head_has_one_place_and_every_page_one_entry(layout: Layout) -> None:
    heads = [head for group in layout.groups for head in group]
    assert sorted(heads) == list(np.ndindex(layout.geometry.layers, layout.geometry.kv_heads))
    assert all(
        layout.groups[layout.head_group[head]][layout.head_column[head]] == head for head in heads
    )
    for chunks in range(-(-layout.max_tokens // layout.chunk_tokens) + 1):
        entries = [layout.span_entries(chunk) for chunk in range(chunks)]
        entries += [layout.raw_entries(chunks, page) for page in range(layout.chunk_pages)]
        flat = np.concatenate(entries) if entries else np.zeros(0, np.int64)
        assert len(np.unique(flat)) == len(flat)
        assert flat.max(initial=0) < layout.group_offset[-1] and flat.min(initial=0) >= 0
        ends = layout.group_offset[:-1] * layout.page_tokens + layout.lengths(chunks, 0)
        assert (layout.raw_entries(chunks, 0) * layout.page_tokens == ends).all()


@FEW
@given(ONE)
def test_the_newest_window_chunks_hold_all_that_a_later_query_sees(layout: Layout) -> None:
    windows = [window for window in layout.geometry.windows if window is not None]
    assert (layout.window_chunks > 0) == bool(windows)
    for window in windows:
        first_query = 10 * layout.chunk_tokens
        seen_chunks = {
            position // layout.chunk_tokens
            for position in range(first_query - window + 1, first_query)
        }
        assert len(seen_chunks) <= layout.window_chunks
    assert layout.window_span_pages == int(layout.sealed_pages[layout.full_groups :].sum())
    assert all(pages == layout.chunk_pages for pages in layout.sealed_pages[layout.full_groups :])


def test_uncompressed_keeps_every_entry_of_every_head() -> None:
    whole = Layout.lay_out_uncompressed(
        geometry(3, 3), chunk_tokens=8, page_tokens=2, heads_per_page=2, max_tokens=32
    )
    assert whole.keeps_everything and (whole.head_kept_tokens == 8).all()
    assert [len(group) for group in whole.groups] == [2, 2, 2, 2, 1]
    assert not layout(3).keeps_everything
    assert whole.page_bytes(2) == 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("groups", "pages", "message"),
    [
        ([[(0, 0)]], [1], "1 2 heads"),
        ([[(0, 0), (0, 0)]], [1], "2 heads one group"),
        ([[(0, 0)], [(0, 0)]], [1, 1], "2 heads one group"),
        ([[(0, 0), (0, 1)], []], [1, 1], "1 2 heads"),
        ([[(0, 0), (0, 1)]], [5], "1 4 pages"),
        ([[(0, 0), (0, 1)]], [0], "1 4 pages"),
        ([[(0, 0), (0, 1)]], [1, 1], "1 groups"),
    ],
)
def test_a_layout_that_does_not_cover_the_heads_is_refused(
    groups: list[list[tuple[int, int]]], pages: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=mentioning(message)):
        Layout.build(
            geometry(1, 2),
            chunk_tokens=8,
            page_tokens=2,
            heads_per_page=2,
            max_tokens=32,
            groups=groups,
            sealed_pages=pages,
        )


def test_a_layer_without_a_group_is_refused() -> None:
    whole = Layout.lay_out_uncompressed(
        geometry(2, 2), chunk_tokens=8, page_tokens=2, heads_per_page=2, max_tokens=32
    )
    with pytest.raises(ConfigError, match=mentioning("2 heads 4")):
        replace(whole, groups=whole.groups[:1])


@settings(max_examples=examples(200), deadline=None)
@given(
    data=st.data(),
    kv_heads=st.integers(1, 4),
    heads_per_page=st.integers(1, 6),
    page=st.sampled_from([1, 4, 16]),
    chunk_pages=st.integers(2, 6),
    retention=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
)
def test_pages_hold_the_entries_that_stay_and_at_most_a_page_for_each_group(
    data: st.DataObject,
    kv_heads: int,
    heads_per_page: int,
    page: int,
    chunk_pages: int,
    retention: float,
) -> None:
    """Whatever layers have windows. Heads that are fewer than a multiple of Hp leave columns empty
    in one group of the compressed layers and in one of those with windows, not in one a layer.
    """
    chunk = page * chunk_pages
    windows = data.draw(
        st.lists(st.none() | st.integers(2, 3 * chunk), min_size=1, max_size=12), "windows"
    )
    model = geometry(len(windows), kv_heads, windows)
    groups = adjacent_groups(model.full_layers, kv_heads, heads_per_page)
    sizes = [len(group) for group in groups]
    whole = {"chunk_tokens": chunk, "page_tokens": page, "heads_per_page": heads_per_page}
    kept = [chunk_pages] * len(groups)
    full, windowed = len(model.full_layers) * kv_heads, len(windows) * kv_heads
    windowed -= full
    if retention < 1 and groups:
        assume(retention * full * chunk >= len(groups) * heads_per_page * page)
        budgets = data.draw(
            st.lists(st.floats(0, 1), min_size=len(groups), max_size=len(groups)), "budgets"
        )
        kept = allot_pages(budgets, sizes, **whole, retention=retention, min_pages=1)
    built = Layout.build(model, **whole, max_tokens=10 * chunk, groups=groups, sealed_pages=kept)
    tokens = data.draw(st.integers(0, 10 * chunk), "tokens")
    sealed, raw = divmod(tokens, chunk)
    newest = min(sealed, max((max(1, -(-(w - 1) // chunk)) for w in windows if w), default=0))
    empty_full, empty_windowed = -full % heads_per_page, -windowed % heads_per_page
    # Profiles count empty columns as entries, so at ρ below 1 none come on top.
    columns = full + (empty_full if retention == 1 else 0)
    bound = retention * columns * chunk * sealed
    bound += (windowed + empty_windowed) * chunk * newest
    bound += (full + empty_full + windowed + empty_windowed) * raw
    held = built.count_held_pages(sealed, raw)
    assert held * built.page_slots <= bound + len(built.groups) * built.page_slots + 1e-6
    assert len(built.groups) == -(-full // heads_per_page) + -(-windowed // heads_per_page)


def test_a_model_with_windows_and_one_kv_head_fills_its_pages() -> None:
    """26 layers as Gemma 3 1B has: four heads a page hold nearly as many tokens as one."""
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]
    model = geometry(26, 1, windows)
    tokens = []
    for heads_per_page in (4, 1):
        built = Layout.lay_out_uncompressed(
            model, chunk_tokens=512, page_tokens=16, heads_per_page=heads_per_page, max_tokens=4096
        )
        pages = 2**30 // built.page_bytes(2)
        tokens.append(built.tokens_in(pages, 4096))
        held = built.count_held_pages(8, 0) * built.page_slots
        assert held <= built.count_uncompressed_entries(4096) * 28 / 26
    assert tokens[0] >= 0.92 * tokens[1]
