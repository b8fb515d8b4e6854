"""Whoever copies the places that the manager tells of has its block tables."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.types import Int64
from tests.core.host.device_double import layout_sets
from tests.core.host.test_cache import admit, manager, tokens_of


class TableCopy:
    """The tables of a manager, copied where it says."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache, self._tables, self.writes = cache, cache.tables.copy(), 0
        cache.follow(self._write)

    def _write(self, slot: int, entries: Int64) -> None:
        self._tables[slot, entries] = self._cache.tables[slot, entries]
        self.writes += 1

    def check(self) -> None:
        assert (self._tables == self._cache.tables).all()


@settings(max_examples=40, deadline=None)
@given(layout_sets(), st.integers(2, 40), st.integers(0, 40))
def test_every_write_is_told(layouts: list[Layout], length: int, common: int) -> None:
    cache = manager(*layouts)
    copy, one = TableCopy(cache), tokens_of(length)
    for tokens in (one, one[: max(1, common)], one):
        seq = admit(cache, tokens)
        copy.check()
        for count in range(seq.computed_tokens + 1, len(tokens) + 1):
            if seq.raw_tokens == seq.layout.chunk_tokens - 1:
                cache.seal(seq)
            else:
                assert cache.extend(seq, 96)
                cache.grow(seq, 1)
            copy.check()
            cache.commit(seq, tokens[:count])
            copy.check()
    assert copy.writes
