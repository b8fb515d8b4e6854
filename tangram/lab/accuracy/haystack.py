"""What needles are hidden in: RULER's noise line, made-up prose, or any other pieces (arXiv
2404.06654, Appendix B).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tangram.calibrate.texts import sentence
from tangram.lab.accuracy.budget import Budget, Stock

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def noise() -> Iterator[str]:
    """The same five sentences over and over."""
    return itertools.repeat(NOISE)


def prose(rng: random.Random) -> Iterator[str]:
    """Made-up English, a sentence a piece; the patterns are those of the pilot texts, the numbers
    at most 400.
    """
    while True:
        yield sentence(rng)


@dataclass(frozen=True)
class Haystack:
    """Pieces, joined by `between`, and what is hidden among them: `needles[i]` at depth `depths[i]`
    of 0 to 1.
    """

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
        """`head`, as many pieces as the budget allows, and `tail`. Raises `ConfigError` if none
        fit.
        """

        def write(count: int) -> str:
            return head + self.text(count) + tail

        return write(budget.fill(write, fewest=fewest))


def hide(
    rng: random.Random,
    pieces: Iterator[str],
    needles: Sequence[str],
    between: str,
    *,
    in_order: bool = False,
) -> Haystack:
    """Needles at random depths; `in_order`: the first one first, as assignments must be."""
    depths = [rng.random() for _ in needles]
    return Haystack(Stock(pieces), needles, sorted(depths) if in_order else depths, between)
