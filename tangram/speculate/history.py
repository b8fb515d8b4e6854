"""Tokens seen so far, and where each pair of them occurred: the index behind prompt lookup and
suffix decoding.

Positions with equal pairs form a chain, newest first, as in LZ77's hash chains. A chain is followed
to find the places whose preceding tokens agree with the end of a context for longest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from tangram.types import Int64

_PAIR_SHIFT = 32  # a pair of tokens is one integer
_NONE = np.int64(-1)  # inside the chain arrays only: no older position


@dataclass(frozen=True)
class Place:
    """An earlier occurrence of the end of a context: `matched` tokens before position `next` equal
    the last `matched` of the context.
    """

    next: int
    matched: int


class TokenHistory:
    """Tokens of one or more texts, in the order of their arrival."""

    def __init__(self) -> None:
        self._tokens = np.zeros(64, np.int64)
        self._older = np.full(64, _NONE)
        self._newest: dict[int, int] = {}
        self._size = 0
        self._starts = [0]  # of texts

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> Int64:
        """int64 [n]: all of them."""
        return self._tokens[: self._size]

    def begin_text(self) -> None:
        """What comes now does not follow on what was before."""
        if self._starts[-1] < self._size:
            self._starts.append(self._size)

    def extend(self, tokens: Int64) -> None:
        """Append `tokens` [n] to the newest text."""
        end = self._size + len(tokens)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[self._size : end] = tokens
        first = max(self._size, self._starts[-1] + 1)
        for position in range(first, end):
            key = int(self._tokens[position - 1]) << _PAIR_SHIFT | int(self._tokens[position])
            self._older[position] = self._newest.get(key, _NONE)
            self._newest[key] = position
        self._size = end

    def places(self, context: Int64, most: int, depth: int) -> list[Place]:
        """Up to `most` earlier occurrences of the end of `context` [n], newest first.

        Each matches at least two tokens; matches are compared over at most `depth` tokens. A place
        that nothing follows yet is left out.
        """
        if len(context) < 2:
            return []
        position = self._newest.get(int(context[-2]) << _PAIR_SHIFT | int(context[-1]), _NONE)
        found: list[Place] = []
        while position != _NONE and len(found) < most:
            if position + 1 < self._end_of_text(int(position)):
                matched = self._count_matched(context, int(position), depth)
                found.append(Place(int(position) + 1, matched))
            position = self._older[position]
        return found

    def after(self, place: Place, most: int) -> Int64:
        """int64 [up to `most`]: what followed at `place`, in the same text."""
        return self.tokens[place.next : min(place.next + most, self._end_of_text(place.next))]

    def _end_of_text(self, position: int) -> int:
        text = bisect_right(self._starts, position)
        return self._starts[text] if text < len(self._starts) else self._size

    def _count_matched(self, context: Int64, position: int, depth: int) -> int:
        """How many tokens up to `position` equal the end of `context`."""
        count = min(depth, len(context), position + 1)
        here, there = self.tokens[position + 1 - count : position + 1], context[-count:]
        differing = np.flatnonzero(here != there)
        return count if not len(differing) else count - 1 - int(differing[-1])

    def _grow(self, least: int) -> None:
        size = max(least, 2 * len(self._tokens))
        self._tokens = np.concatenate([self._tokens, np.zeros(size - len(self._tokens), np.int64)])
        self._older = np.concatenate([self._older, np.full(size - len(self._older), _NONE)])
