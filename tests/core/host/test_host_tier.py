"""Host memory behind the pool: what comes back is what its key stands for, whatever was evicted on
the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.cache.host import HostTier
from tangram.cache.keys import chunk_key, root_key, window_key
from tangram.cache.layout import Layout
from tangram.cache.prefix import Link
from tangram.cache.sequence_cache import SequenceCache
from tangram.config import EngineConfig
from tangram.errors import ConfigError, IntegrityError
from tangram.types import Int32, Int64
from tangram.watch import ChunkPlace, ChunkStored, LinkDropped
from tests.core.host.device_double import (
    NumberedCache,
    geometry,
    layout,
    layout_sets,
    recount,
    retentions,
)
from tests.examples import examples
from tests.mentions import mentioning

LIMIT = 40


class Copies(RuleBasedStateMachine):
    """Sequences come, are computed, and go, over a pool hardly larger than one of them; every page
    has a label.

    The device makes the moves as a step would: before it writes what the step computes.
    """

    @initialize(
        layouts=layout_sets(max_tokens=LIMIT),
        slack=st.integers(0, 40),
        host=st.sampled_from([400, 60, 20]),
    )
    def build(self, layouts: list[Layout], slack: int, host: int) -> None:
        pages = max(entry.most_pages(LIMIT) for entry in layouts) + slack
        self.manager = NumberedCache(
            retentions(*layouts),
            total_pages=pages,
            max_sequences=3,
            prefix_caching=True,
            host_pages=host,
        )
        self.pool: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.tokens: dict[int, Int64] = {}
        self.manager.note_changes()
        self.told = {ChunkPlace.DEVICE: set[bytes](), ChunkPlace.HOST: set[bytes]()}

    @invariant()
    def tell_every_link(self) -> None:
        """Whoever follows the changes knows at any time which chunks are where."""
        for change in self.manager.take_changes():
            if isinstance(change, LinkDropped):
                self.told[change.place].remove(change.key)
                continue
            stored = isinstance(change, ChunkStored)
            place = self.told[ChunkPlace.DEVICE if stored else ChunkPlace.HOST]
            assert change.key not in place
            place.add(change.key)
            if stored and change.parent is not None:
                assert change.parent in place
                assert change.key == chunk_key(change.parent, change.tokens)
        nodes = self.manager.prefix.nodes.values()
        assert self.told[ChunkPlace.DEVICE] == {
            node.key for node in nodes if node.link is Link.CHUNK
        }
        assert self.told[ChunkPlace.HOST] == set(self.manager.host.links)

    @rule(
        stems=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        length=st.sampled_from([40, 33, 21]),
    )
    def visit(self, stems: list[int], length: int) -> None:
        """Some come and go, one after the other."""
        for stem in stems:
            seq = self.come(stem, length, 0)
            if seq is not None:
                self.compute(sorted(self.tokens).index(seq.slot), 0)
                self.close(sorted(self.tokens).index(seq.slot))

    @rule(stem=st.integers(0, 3), length=st.sampled_from([40, 33, 21, 5]), which=st.integers(0, 1))
    def admit(self, stem: int, length: int, which: int) -> None:
        self.come(stem, length, which)

    def come(self, stem: int, length: int, which: int) -> SequenceCache | None:
        tokens = np.arange(length) * (stem + 1) % 7
        before = self.manager.host.restored_tokens
        seq = self.manager.enter(which, "", tokens, LIMIT)
        if seq is not None:
            self.tokens[seq.slot] = tokens
            assert 0 <= self.manager.host.restored_tokens - before <= seq.cached_tokens
            recount(self.manager)
        return seq

    @precondition(lambda self: self.tokens)
    @rule(which=st.integers(0, 9), decode=st.integers(0, 9))
    def compute(self, which: int, decode: int) -> None:
        """Steps up to the end of the tokens, then some that decode."""
        seq = self.manager.sequences[sorted(self.tokens)[which % len(self.tokens)]]
        size = seq.layout.chunk_tokens
        while (rest := len(self.tokens[seq.slot]) - seq.sealed_chunks * size) >= size:
            self.seal(seq)
        if rest > seq.raw_tokens:
            self.grow(seq, rest - seq.raw_tokens)
        for token in range(min(decode, LIMIT - seq.computed_tokens)):
            if not seq.raw_tokens and not self.manager.extend(seq, LIMIT):
                return
            self.tokens[seq.slot] = np.append(self.tokens[seq.slot], token % 3)
            self.grow(seq, 1)
            if seq.raw_tokens == size:
                self.seal(seq)

    def seal(self, seq: SequenceCache) -> None:
        self.manager.seal(seq)
        self.run()
        self.write(seq)
        self.commit(seq)

    def grow(self, seq: SequenceCache, tokens: int) -> None:
        self.manager.grow(seq, tokens)
        self.run()
        self.commit(seq)

    def commit(self, seq: SequenceCache) -> None:
        self.manager.commit(seq, self.tokens[seq.slot])
        recount(self.manager)
        self.check(seq)

    @precondition(lambda self: self.tokens)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        slot = sorted(self.tokens)[which % len(self.tokens)]
        self.manager.close(self.manager.sequences[slot])
        del self.tokens[slot]
        recount(self.manager)

    @rule(pages=st.sampled_from([400, 20, 5]))
    def evict(self, pages: int) -> None:
        self.manager.prefix.evict(pages)
        recount(self.manager)

    @precondition(lambda self: self.manager.host.used > 40)
    @rule()
    def clear(self) -> None:
        self.manager.prefix.clear()
        assert self.manager.host.used == 0 and not self.manager.host.links

    def run(self) -> None:
        before = dict(self.pool)  # pages that leave are read before any comes in
        for move in self.manager.take_moves(())[0]:
            for page, slot in zip(move.pages.tolist(), move.slots.tolist(), strict=True):
                if move.inward:
                    self.pool[page] = self.host[slot]
                else:
                    self.host[slot] = before[page]

    def write(self, seq: SequenceCache) -> None:
        """What the step leaves in the newest chunk's pages."""
        chunk = seq.sealed_chunks - 1
        for pages, key in self.spans(seq, chunk):
            self.pool.update({page: (key, number) for number, page in enumerate(pages.tolist())})

    def check(self, seq: SequenceCache) -> None:
        for chunk in range(seq.sealed_chunks):
            for pages, key in self.spans(seq, chunk):
                assert [self.pool[page] for page in pages.tolist()] == [
                    (key, at) for at in range(len(pages))
                ]

    def spans(self, seq: SequenceCache, chunk: int) -> list[tuple[Int32, bytes]]:
        key, size = root_key(seq.keys.retention.fingerprint, ""), seq.layout.chunk_tokens
        for begin in range(0, (chunk + 1) * size, size):
            key = chunk_key(key, self.tokens[seq.slot][begin : begin + size])
        windows = seq.window_spans[max(0, chunk - seq.sealed_chunks + len(seq.window_spans)) :]
        sees = chunk >= seq.sealed_chunks - len(seq.window_spans)
        return [(seq.spans[chunk], key), *([(windows[0], window_key(key))] if sees else [])]


TestCopies = Copies.TestCase
TestCopies.settings = settings(
    max_examples=examples(120),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def visit(cache: NumberedCache, tokens: Int64) -> int:
    """A sequence comes, is computed and goes; how much of it was cached."""
    seq = cache.enter(0, "", tokens, len(tokens))
    assert seq is not None
    while len(tokens) - seq.computed_tokens >= seq.layout.chunk_tokens:
        cache.seal(seq)
        cache.commit(seq, tokens)
    cache.take_moves(())
    cache.close(seq)
    return seq.cached_tokens


def small(host_pages: int, *, windows: tuple[int | None, ...] = (None, None)) -> NumberedCache:
    """Chunks of 8 tokens and, without windows, 8 pages; space for three of them on the device."""
    (only,) = retentions(layout(4, model=geometry(2, 2, windows)))
    return NumberedCache(
        [only], total_pages=27, max_sequences=2, prefix_caching=True, host_pages=host_pages
    )


def test_a_copy_stays_when_its_chunk_comes_back_and_so_costs_nothing_the_second_time() -> None:
    cache, (one, two) = small(100), (np.arange(25) + start for start in (0, 100))
    assert [visit(cache, tokens) for tokens in (one, two)] == [0, 0]
    assert visit(cache, one) == visit(cache, two) == 24
    copied = cache.host.pages_out
    assert [visit(cache, tokens) for tokens in (one, two)] == [24, 24]
    assert cache.host.pages_out == copied and cache.host.restored_tokens == 4 * 24


def test_clearing_the_cache_leaves_alone_what_a_sequence_waits_for() -> None:
    cache = small(100)
    for start in (0, 100):
        visit(cache, np.arange(25) + start)
    seq = cache.enter(0, "", np.arange(25), 25)
    assert seq is not None and seq.cached_tokens == 24
    cache.prefix.clear()
    brought = [
        page for move in cache.take_moves(())[0] if move.inward for page in move.pages.tolist()
    ]
    assert set(np.concatenate(seq.spans).tolist()) <= set(brought)


def test_of_a_chain_the_end_is_let_go_first() -> None:
    cache = small(16)
    for start in (0, 100):
        visit(cache, np.arange(25) + start)
    assert visit(cache, np.arange(25)) == 16 and cache.host.dropped > 0


def test_what_is_in_use_is_let_go_last_and_children_before_parents() -> None:
    tier, pages = HostTier(4, 9), iter(np.arange(9, dtype=np.int32)[:, None])
    for key in (b"parent", b"child", b"unrelated", b"other"):
        tier.offer(key, next(pages))
    with tier.holding([b"parent", b"child"]):
        for key in (b"new", b"newer", b"too many"):
            tier.offer(key, next(pages))
        assert list(tier.links) == [b"child", b"parent", b"new", b"newer"]
    tier.offer(b"newest", next(pages))
    assert list(tier.links) == [b"parent", b"new", b"newer", b"newest"] and tier.dropped == 4


def test_a_chunk_that_comes_back_is_not_pushed_out_by_what_makes_way_for_it() -> None:
    cache = small(8)
    visit(cache, np.arange(9))
    visit(cache, np.arange(25) + 100)
    assert cache.host.used == 8
    assert visit(cache, np.arange(9)) == 8


def test_no_space_is_found_before_anything_is_copied() -> None:
    cache = small(100)
    for start in (0, 100):
        visit(cache, np.arange(25) + start)
    cache.take_moves(())
    busy = cache.enter(0, "", np.arange(9) + 200, 9)
    assert busy is not None
    assert cache.enter(0, "", np.arange(25), 25) is None
    assert not cache.take_moves(())[0] and cache.host.pages_in == 0


def test_windows_come_back_with_their_chunks_and_only_the_newest() -> None:
    cache = small(100, windows=(None, 5))
    for start in (0, 100):
        visit(cache, np.arange(17) + start)
    cache.prefix.evict(27)
    cache.take_moves(())
    seq = cache.enter(0, "", np.arange(17), 17)
    assert seq is not None and seq.cached_tokens == 16 and seq.arriving
    moves, awaited, _ = cache.take_moves([seq.slot])
    assert awaited and not seq.arriving
    assert sum(len(move.pages) for move in moves if move.inward) == 4 + 4 + 4


def test_nothing_is_kept_without_host_pages_and_what_was_dropped_is_counted() -> None:
    cache = small(0)
    for start in (0, 100):
        visit(cache, np.arange(25) + start)
    assert cache.host.dropped > 0 and not cache.host.links and not cache.take_moves(())[0]
    assert visit(cache, np.arange(25)) == 0


def test_another_layout_and_another_salt_find_nothing() -> None:
    both = retentions(layout(4), layout(4))
    cache = NumberedCache(
        both, total_pages=27, max_sequences=2, prefix_caching=True, host_pages=100
    )
    for start in (0, 100):
        visit(cache, np.arange(25) + start)
    root = root_key("profile 0", "")
    assert chunk_key(root, np.arange(8)) in cache.host.links
    for which, salt in ((1, ""), (0, "salt")):
        seq = cache.enter(which, salt, np.arange(25), 25)
        assert seq is not None and seq.cached_tokens == 0
        cache.close(seq)


def test_a_lost_host_page_is_found() -> None:
    tier = HostTier(4, 4)
    tier.offer(b"key", np.arange(2, dtype=np.int32))
    tier.check()
    del tier.links[b"key"]
    with pytest.raises(IntegrityError, match="miscounted"):
        tier.check()


@given(st.sampled_from([-1.0, float("nan"), float("inf")]))
def test_host_memory_is_not_negative_and_not_without_limit(gib: float) -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_offload_gib 0")):
        EngineConfig(kv_offload_gib=gib)


def test_host_memory_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_offload_gib 1.0 enable_prefix_caching")):
        EngineConfig(kv_offload_gib=1.0, enable_prefix_caching=False)
