"""The texts that hide needles: RULER's noise line, generated prose, or any other pieces.

They are in arXiv 2404.06654, Appendix B.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tangram.calibrate.texts import sentence
from tangram_lab.accuracy.budget import Budget, Stock

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def noise() -> Iterator[str]:
    """The same five sentences over and over."""
    return itertools.repeat(NOISE)


def prose(rng: random.Random) -> Iterator[str]:
    """Generated English, one sentence a piece, with the patterns of the calibration texts.

    Numbers are at most 400.
    """
    while True:
        yield sentence(rng)


@dataclass(frozen=True)
class Haystack:
    """Pieces, joined by `between`, with `needles[i]` hidden at depth `depths[i]` of 0 to 1."""

    pieces: Stock[str]
    needles: Sequence[str]
    depths: Sequence[float]
    between: str

    def text(self, count: int) -> str:
        """The first `count` pieces and all needles, in the order of their depths."""
        pieces = self.pieces.first(count)
        places = sorted(zip(self.depths, self.needles, strict=True), key=lambda place: place[0])
        mixed: list[str] = []
        done = 0
        for depth, needle in places:
            here = round(depth * count)
            mixed += [*pieces[done:here], needle]
            done = here
        return self.between.join(mixed + pieces[done:])

    def fill(self, budget: Budget, head: str, tail: str, *, fewest: int = 0) -> str:
        """`head`, as many pieces as the budget allows, `tail`. Raises `ConfigError` if none fit."""

        def write(count: int) -> str:
            return head + self.text(count) + tail

        return write(budget.fill(write, fewest=fewest))


def hide_needles(
    rng: random.Random,
    pieces: Iterator[str],
    needles: Sequence[str],
    between: str,
    *,
    in_order: bool = False,
) -> Haystack:
    """Needles at random depths. With `in_order` the first one comes first, as assignments must."""
    depths = [rng.random() for _ in needles]
    return Haystack(Stock(pieces), needles, sorted(depths) if in_order else depths, between)
