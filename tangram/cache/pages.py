"""The ledger: free pages of the pool, and the reference count of every other page."""

from __future__ import annotations

import numpy as np

from tangram.errors import IntegrityError
from tangram.types import Int32


class Ledger:
    """Reference counts for `total` pages, vectorised.

    A page returns to the free stack when its count reaches 0.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.references = np.zeros(total, np.int32)
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total

    def take(self, count: int) -> Int32:
        """`count` free pages, int32 [count], each with one reference.

        Raises `IntegrityError` if fewer are free.
        """
        if count > self.free:
            raise IntegrityError(
                f"{count} pages were asked for, {self.free} of {self.total} are free"
            )
        self.free -= count
        pages = self._stack[self.free : self.free + count].copy()
        self.references[pages] = 1
        return pages

    def share(self, pages: Int32) -> None:
        """Add a reference to each of `pages` int32 [n], which must be distinct and in use."""
        self.references[pages] += 1

    def release(self, pages: Int32) -> None:
        """Drop a reference from each of `pages` int32 [n], which must be distinct and in use."""
        self.references[pages] -= 1
        freed = pages[self.references[pages] == 0]
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def check(self, expected: Int32) -> None:
        """Raise `IntegrityError` unless the counts equal `expected` int32 [total].

        The free stack must hold each other page exactly once.
        """
        wrong = np.flatnonzero(self.references != expected)
        if len(wrong):
            page = int(wrong[0])
            raise IntegrityError(
                f"{len(wrong)} pages are miscounted: page {page} has {self.references[page]} "
                f"references, {expected[page]} were expected"
            )
        free = np.sort(self._stack[: self.free])
        if not np.array_equal(free, np.flatnonzero(expected == 0)):
            raise IntegrityError(
                f"the free stack of {self.free} pages is not the set of unreferenced pages"
            )
