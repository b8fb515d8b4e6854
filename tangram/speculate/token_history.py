"""Tokens seen so far, and where each pair of them occurred: the index behind prompt lookup and
suffix decoding.

Positions with equal pairs form a chain, newest first, as in LZ77's hash chains. A chain is followed
to find the places whose preceding tokens agree with the end of a context for longest.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tangram.types import Int64

_PAIR_SHIFT = 32  # a pair of tokens is one integer
_NONE = -1  # inside the chains only: no older position


class Place(NamedTuple):
    """An earlier occurrence of the end of a context: `matched` tokens before position `next` equal
    the last `matched` of the context.
    """

    next: int
    matched: int


class TokenHistory:
    """Tokens of one or more texts, in the order of their arrival."""

    # Arrays of the standard library: single items of them are read and appended fast.
    def __init__(self) -> None:
        self._tokens, self._older = array("q"), array("q")
        self._newest: dict[int, int] = {}
        self._starts = [0]  # of texts

    def __len__(self) -> int:
        return len(self._tokens)

    def newest(self, most: int) -> list[int]:
        """The last tokens, up to `most`."""
        return self._tokens[-most:].tolist()

    def begin_text(self) -> None:
        """What comes now does not follow on what was before."""
        if self._starts[-1] < len(self):
            self._starts.append(len(self))

    def extend(self, tokens: Int64) -> None:
        """Append `tokens` [n] to the newest text."""
        for token in tokens.tolist():
            position = len(self)
            older = _NONE
            if position > self._starts[-1]:
                pair = self._tokens[-1] << _PAIR_SHIFT | token
                older = self._newest.get(pair, _NONE)
                self._newest[pair] = position
            self._tokens.append(token)
            self._older.append(older)

    def places(self, context: Sequence[int], most: int) -> list[Place]:
        """Up to `most` earlier occurrences of the end of `context` [n], newest first.

        Each matches at least two tokens. A place that nothing follows yet is left out.
        """
        if len(context) < 2:
            return []
        position = self._newest.get(context[-2] << _PAIR_SHIFT | context[-1], _NONE)
        whole = array("q", context)
        found: list[Place] = []
        while position != _NONE and len(found) < most:
            if position + 1 < self._end_of_text(position):
                found.append(Place(position + 1, self._count_matched(whole, position)))
            position = self._older[position]
        return found

    def after(self, place: Place, most: int) -> list[int]:
        """Up to `most` tokens: what followed at `place`, in the same text."""
        end = min(place.next + most, self._end_of_text(place.next))
        return self._tokens[place.next : end].tolist()

    def _end_of_text(self, position: int) -> int:
        if position >= self._starts[-1]:
            return len(self._tokens)
        return self._starts[bisect_right(self._starts, position)]

    def _count_matched(self, context: array[int], position: int) -> int:
        """How many tokens up to `position` equal the end of `context`."""
        end = position + 1
        if self._tokens[max(0, end - len(context)) : end] == context:
            return len(context)
        most, count = min(len(context), end), 2  # a pair in a chain is equal
        while count < most and self._tokens[position - count] == context[-1 - count]:
            count += 1
        return count
