"""Check the page accounting of a cache: who holds each page, and which pages are promised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.cache.manager import CacheManager
from tangram.errors import IntegrityError


@dataclass(frozen=True)
class PageStates:
    """How many pages of the pool are `held`, `cached` and `free`; the three add up to the pool.

    Sequences hold the `held` pages. The prefix cache alone holds the `cached` pages, which can be
    evicted. `promised` counts pages that were promised to sequences and are not taken yet. They are
    no particular pages, and come out of those that are cached or free.
    """

    held: int
    cached: int
    free: int
    promised: int

    @classmethod
    def of(cls, cache: CacheManager) -> PageStates:
        """The states now, from the totals that the cache keeps."""
        cached, free = cache.prefix.idle_pages, cache.ledger.free
        return cls(
            cache.ledger.total - cached - free, cached, free, cached + free - cache.spare_pages
        )


def check_accounting(cache: CacheManager) -> None:
    """Check that pages are accounted for, formulas hold and promises are covered.

    Raises `IntegrityError` if not.
    """
    expected = np.zeros(cache.ledger.total, np.int32)
    for seq in cache.sequences.values():
        for pages in (*seq.spans, *seq.window_spans, *seq.raw_pages, *seq.snapshots.values()):
            expected[pages] += 1
        if seq.held_pages != seq.formula_pages:
            raise IntegrityError(
                f"slot {seq.slot} holds {seq.held_pages} pages, the formula says "
                f"{seq.formula_pages}"
            )
    for node in cache.prefix.nodes.values():
        expected[node.pages] += 1
    cache.ledger.check(expected)
    cache.host.check()
    idle = sum(len(node.pages) for node in cache.prefix.nodes.values() if node.users == 0)
    if idle != cache.prefix.idle_pages:
        raise IntegrityError(
            f"{idle} cached pages are idle, the cache counts {cache.prefix.idle_pages}"
        )
    owed = sum(seq.owed_pages for seq in cache.sequences.values())
    if owed != cache.counted_owed_pages:
        raise IntegrityError(
            f"sequences are owed {owed} pages, the cache counts {cache.counted_owed_pages}"
        )
    if cache.spare_pages < 0:
        raise IntegrityError(f"{-cache.spare_pages} pages were promised that do not exist")
