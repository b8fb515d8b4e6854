"""What every page of a cache holds now, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.cache.manager import CacheManager
from tangram.cache.sequence_cache import SequenceCache
from tangram.types import Int32, UInt8
from tangram.watch import PageState


@dataclass(frozen=True, eq=False)
class PageMap:
    """`states` uint8 [pages] are `PageState`s.

    `holders` int32 [pages] number the given sequences: one that holds the page, -1 if none does.
    """

    states: UInt8
    holders: Int32

    @classmethod
    def of(cls, cache: CacheManager, sequences: Sequence[SequenceCache]) -> PageMap:
        """The pages of `cache` now; `sequences` are those that run, in any order."""
        total = cache.ledger.total
        states = np.full(total, PageState.FREE, np.uint8)
        states[cache.ledger.references > 0] = PageState.CACHED
        holders = np.full(total, -1, np.int32)
        shared = np.zeros(total, np.bool_)
        for number, seq in enumerate(sequences):
            for pages, state in (
                (_join([*seq.spans, *seq.window_spans]), PageState.SEALED),
                (_join(seq.raw_pages), PageState.RAW),
            ):
                shared[pages] |= holders[pages] >= 0
                holders[pages] = number
                states[pages] = state
        states[shared] = PageState.SHARED
        return cls(states, holders)


def _join(parts: Sequence[Int32]) -> Int32:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
