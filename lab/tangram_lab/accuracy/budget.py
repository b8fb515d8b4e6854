"""The length limit of a context, and the search for the longest text within it.

The search calls the tokenizer a few times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tangram.errors import ConfigError

Piece = TypeVar("Piece")

_PROBE_UNITS = 16
_FULL_ENOUGH = 0.98  # the search ends at this share; the suites promise 0.95


@dataclass(frozen=True)
class Budget:
    """At most `context_tokens`, counted by `count_tokens`.

    The question, its reply and the chat template are not included.
    """

    count_tokens: Callable[[str], int]
    context_tokens: int

    def fill(self, write: Callable[[int], str], *, fewest: int = 0) -> int:
        """The largest number of units whose text `write(units)` has at most `context_tokens`.

        The result is approximate: either one more unit is too many, or 98 % are filled. `write`
        must make longer texts of more units, with at least one token a unit. The length is nearly
        linear in the units, so a secant finds the number. It tokenizes two short texts and two or
        three long ones.

        Raises `ConfigError` if `write(fewest)` is too long.
        """
        low, low_tokens = fewest, self.count_tokens(write(fewest))
        if low_tokens > self.context_tokens:
            raise ConfigError(
                f"context_tokens is {self.context_tokens}, the shortest text of this task has "
                f"{low_tokens} tokens: ask for {low_tokens} at least"
            )
        most = fewest + self.context_tokens
        high, high_tokens = min(fewest + _PROBE_UNITS, most), low_tokens
        while True:
            high_tokens = self.count_tokens(write(high))
            if high_tokens > self.context_tokens or high == most:
                break
            missing = (
                (self.context_tokens - high_tokens)
                * (high - low)
                / max(high_tokens - low_tokens, 1)
            )
            low, low_tokens, high = high, high_tokens, min(high + math.ceil(missing) + 1, most)
        if high_tokens <= self.context_tokens:
            return high
        return self._between(write, low, low_tokens, high, high_tokens)

    def _between(
        self, write: Callable[[int], str], low: int, low_tokens: int, high: int, high_tokens: int
    ) -> int:
        """Interpolate between `low` units, which fit, and `high`, which do not.

        Every other step halves the interval, in case one end does not move.
        """
        halve = False
        while high - low > 1 and low_tokens < _FULL_ENOUGH * self.context_tokens:
            share = (
                0.5 if halve else (self.context_tokens - low_tokens) / (high_tokens - low_tokens)
            )
            units = min(max(low + int(share * (high - low)), low + 1), high - 1)
            tokens = self.count_tokens(write(units))
            if tokens <= self.context_tokens:
                low, low_tokens = units, tokens
            else:
                high, high_tokens = units, tokens
            halve = not halve
        return low


class Stock(Generic[Piece]):
    """The first pieces of an endless supply, kept so that a longer text continues a shorter."""

    def __init__(self, supply: Iterator[Piece]) -> None:
        self._supply = supply
        self._made: list[Piece] = []

    def first(self, count: int) -> list[Piece]:
        """The first `count` pieces."""
        while len(self._made) < count:
            self._made.append(next(self._supply))
        return self._made[:count]
