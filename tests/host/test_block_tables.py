"""Whoever copies the rows of the block tables whose version has changed, and no others, has them all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tests.host.support import layout_sets
from tests.host.test_cache import admit, manager, tokens_of


class Copy:
    """The tables of a manager, followed by their versions."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache, self._tables, self._seen = cache, cache.tables.copy(), cache.versions.copy()
        self.rows_copied = 0

    def check(self) -> None:
        changed = self._seen != self._cache.versions
        self.rows_copied += int(changed.sum())
        self._tables[changed] = self._cache.tables[changed]
        self._seen[:] = self._cache.versions
        assert (self._tables == self._cache.tables).all()


@settings(max_examples=40, deadline=None)
@given(layout_sets(), st.integers(2, 40), st.integers(0, 40))
def test_a_row_that_was_written_has_another_version(layouts: list[Layout], length: int, common: int) -> None:
    cache = manager(*layouts)
    copy, one = Copy(cache), tokens_of(length)
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
    assert copy.rows_copied
