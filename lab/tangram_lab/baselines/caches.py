"""Caches of systems without budgets.

They measure what reservation saves, and what budgets cost in accuracy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.sequence_cache import SequenceCache
from tangram.errors import IntegrityError
from tangram.types import Int32, Int64


class LateCache(CacheManager, ABC):
    """A `CacheManager` that stores chunks whole; entries are selected after sealing.

    A step seals at most one chunk of a sequence.
    """

    def can_leave_open(self, seq: SequenceCache) -> bool:
        """See `CacheManager`: a chunk has its pages when it is reclaimed, after sealing."""
        return False

    @abstractmethod
    def reclaim(self, slot: int, kept_tokens: Int64) -> None:
        """Record the entries of the last sealed chunk that stay, `kept_tokens` [n].

        Heads of full-attention layers come in order.
        """


class ByInputCache(LateCache):
    """A cache in which each chunk's own scores decide how many entries a head keeps.

    Every group has one head, and pages for all entries. No page is given back and no prefix is
    shared: a chunk's entries follow the entries before it within a page.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept = np.zeros_like(self.lengths)  # of all sealed chunks

    def past_lengths(self, slot: int, layout: Layout, position: int) -> Int32:
        """See `CacheManager`; sliding windows hold every entry."""
        lengths, full = super().past_lengths(slot, layout, position), layout.full_groups
        lengths[:full] = self._kept[slot, :full] + position % layout.chunk_tokens
        return lengths

    def reclaim(self, slot: int, kept_tokens: Int64) -> None:
        """See `LateCache`."""
        seq = self.sequences[slot]
        layers, heads = zip(
            *(group[0] for group in seq.layout.groups[: seq.layout.full_groups]), strict=True
        )
        counts = np.zeros((seq.layout.geometry.layers, seq.layout.geometry.kv_heads), np.int64)
        counts[list(seq.layout.geometry.full_layers)] = kept_tokens.reshape(
            -1, seq.layout.geometry.kv_heads
        )
        self._kept[slot, : len(layers)] += counts[layers, heads].astype(np.int32)
        self._write_lengths(seq)

    def close(self, seq: SequenceCache) -> None:
        """See `CacheManager`."""
        self._kept[seq.slot] = 0
        super().close(seq)


class DynamicCache(LateCache):
    """A cache whose `seal` takes pages for all tokens of a chunk; `reclaim` returns the surplus.

    Between steps it holds the same pages as a `CacheManager`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._surplus: dict[
            int, tuple[Int64, Int32]
        ] = {}  # by slot: table entries of its open chunk, and their pages

    @property
    def spare_pages(self) -> int:
        """See `CacheManager`: a surplus is part of the pages promised to its sequence."""
        return super().spare_pages + sum(len(pages) for _, pages in self._surplus.values())

    def reclaim(self, slot: int, kept_tokens: Int64) -> None:
        """See `LateCache`: empty pages are given back.

        Raises `IntegrityError` unless each head keeps the layout's number of entries, since lengths
        are already written.
        """
        layout = self.sequences[slot].layout
        promised = layout.head_kept_tokens[list(layout.geometry.full_layers)]
        if not np.array_equal(kept_tokens, promised.ravel()):
            raise IntegrityError(f"the chunk of slot {slot} kept other counts than its layout says")
        entries, pages = self._surplus.pop(slot)
        self._enter(self.sequences[slot], entries, np.zeros_like(pages))
        self.ledger.release(pages)

    def close(self, seq: SequenceCache) -> None:
        """See `CacheManager`. A step that failed before it could reclaim is handled, too."""
        if seq.slot in self._surplus:
            self.ledger.release(self._surplus.pop(seq.slot)[1])
        super().close(seq)

    def _promise(self, layout: Layout, tokens: int, limit: int) -> int:
        return max(super()._promise(layout, tokens, limit), layout.peak_pages(tokens))

    def _take_span(self, seq: SequenceCache) -> Int32:
        """The first pages taken for each group; the others are entered after them."""
        layout, chunk = seq.layout, seq.sealed_chunks
        taken = self._take(layout.chunk_pages * len(layout.groups)).reshape(-1, layout.chunk_pages)
        entries = np.stack(
            [layout.raw_entries(chunk, page) for page in range(layout.chunk_pages)], axis=1
        )
        beyond = np.arange(layout.chunk_pages) >= layout.sealed_pages[:, None]
        if beyond.any():
            self._surplus[seq.slot] = entries[beyond], taken[beyond]
            self._enter(seq, *self._surplus[seq.slot])
        return taken[~beyond]
