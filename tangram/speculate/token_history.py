"""Tokens seen so far, and where each pair of them occurred: the index behind prompt lookup and
suffix decoding.

Positions with pairs of one hash form a chain, newest first, as in LZ77's hash chains. A chain is
followed to find the places whose preceding tokens agree with the end of a context for longest.
"""

from __future__ import annotations

import numpy as np

from tangram.speculate.lookup_loops import NONE, find_places, link_positions, note_continuations
from tangram.types import Int32, Int64

_FIRST_TOKENS = 1024  # of a history, before it needs more memory


class TokenHistory:
    """Tokens of one or more texts, in the order of their arrival."""

    def __init__(self) -> None:
        self._size, self._tokens = 0, np.zeros(0, np.int32)
        self._starts = np.zeros(1, np.int64)  # of texts
        self._reserve(_FIRST_TOKENS)

    def __len__(self) -> int:
        return self._size

    def newest(self, most: int) -> Int32:
        """The last tokens, int32 [up to `most`]."""
        return self._tokens[max(0, self._size - most) : self._size]

    def begin_text(self) -> None:
        """What comes now does not follow on what was before."""
        if self._starts[-1] < self._size:
            self._starts = np.append(self._starts, self._size)

    def extend(self, tokens: Int64) -> None:
        """Append `tokens` [n] to the newest text."""
        begin, end = self._size, self._size + len(tokens)
        if end > len(self._tokens):
            self._reserve(1 << (end - 1).bit_length())
        self._tokens[begin:end] = tokens
        self._size = end
        self._link(begin)

    def places(self, context: Int32, most: int) -> Int64:
        """[up to `most`, 3]: earlier occurrences of the end of `context` [n], newest first.

        The position behind each, where its text ends, and how many tokens it matches, two at least.
        A place that nothing follows yet is left out.
        """
        found = np.empty((most, 3), np.int64)
        arrays = self._tokens, self._older, self._newest, self._starts
        return found[: find_places(*arrays, self._size, context, found)]

    def after(self, place: Int64, most: int) -> Int64:
        """int64 [up to `most`]: what followed at one of the `places`, in the same text."""
        begin, end, _ = place.tolist()
        return self._tokens[begin : min(begin + most, end)].astype(np.int64)

    def note_continuations(
        self, context: Int32, most: int, known: int, continuations: Int64
    ) -> int:
        """Write what followed up to `most` of the `places` into rows of `continuations`.

        Rows are as `copy_continuations` writes them, from row `known` on. Returns the row behind.
        """
        if not self._size:
            return known
        found = np.empty((most, 3), np.int64)
        arrays = self._tokens, self._older, self._newest, self._starts
        return int(note_continuations(*arrays, self._size, context, found, known, continuations))

    def _reserve(self, tokens: int) -> None:
        """Memory for so many tokens, a power of two, and as many chains."""
        kept = self._tokens[: self._size]
        self._tokens = np.empty(tokens, np.int32)
        self._tokens[: self._size] = kept
        self._older = np.empty(tokens, np.int32)
        self._newest = np.full(tokens, NONE, np.int32)
        self._link(0)

    def _link(self, begin: int) -> None:
        arrays = self._tokens, self._older, self._newest, self._starts
        link_positions(*arrays, begin, self._size)
