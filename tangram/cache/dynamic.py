"""The cache of systems without budgets, to measure what reservation saves: allocate whole chunks, then reclaim."""

from __future__ import annotations

from typing import Any

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.sequence import SequenceCache
from tangram.errors import IntegrityError
from tangram.types import Int32, Int64


class DynamicCache(CacheManager):
    """A `CacheManager` whose `seal` takes pages for all tokens of a chunk, until `reclaim` is told what was kept.

    Between steps it holds what a `CacheManager` holds. A step seals at most one chunk of a sequence.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._surplus: dict[int, tuple[Int64, Int32]] = {}  # by slot: table entries of its open chunk and their pages

    @property
    def spare_pages(self) -> int:
        """See `CacheManager`: a surplus is part of what its sequence was promised."""
        return super().spare_pages + sum(len(pages) for _, pages in self._surplus.values())

    def reclaim(self, slot: int, kept_tokens: Int64) -> None:
        """Give back what the chunk sealed last leaves empty with `kept_tokens` [n], heads of full layers in order.

        Raises `IntegrityError` unless a head keeps as many as the layout says: lengths are written already.
        """
        layout = self.sequences[slot].layout
        promised = layout.head_kept_tokens[list(layout.geometry.full_layers)]
        if not np.array_equal(kept_tokens, promised.ravel()):
            raise IntegrityError(f"the chunk of slot {slot} kept other counts than its layout says")
        entries, pages = self._surplus.pop(slot)
        self._enter(self.sequences[slot], entries, np.zeros_like(pages))
        self.ledger.release(pages)

    def close(self, seq: SequenceCache) -> None:
        """See `CacheManager`; also when a step was broken off before it could reclaim."""
        if seq.slot in self._surplus:
            self.ledger.release(self._surplus.pop(seq.slot)[1])
        super().close(seq)

    def _promise(self, layout: Layout, tokens: int, limit: int) -> int:
        return max(super()._promise(layout, tokens, limit), layout.peak_pages(tokens))

    def _take_span(self, seq: SequenceCache) -> Int32:
        """The first of the pages taken for each group; the others are entered behind them."""
        layout, chunk = seq.layout, seq.sealed_chunks
        taken = self._take(layout.max_raw_pages).reshape(-1, layout.chunk_pages)
        entries = np.stack([layout.raw_entries(chunk, page) for page in range(layout.chunk_pages)], axis=1)
        beyond = np.arange(layout.chunk_pages) >= layout.sealed_pages[:, None]
        if beyond.any():
            self._surplus[seq.slot] = entries[beyond], taken[beyond]
            self._enter(seq, *self._surplus[seq.slot])
        return taken[~beyond]
