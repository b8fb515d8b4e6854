"""RULER's needles in a haystack, in eight variants (arXiv 2404.06654, Section 3 and Appendix B)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tangram_lab.accuracy import words
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.haystack import hide_needles, noise, prose
from tangram_lab.accuracy.sample import Draft, Question

_NUMBER_DIGITS = 7
_REPLY_TOKENS = 128

Content = Literal["words", "numbers", "uuids"]

SUPPLIES: dict[Content, Callable[[random.Random], Iterator[str]]] = {
    "words": words.keys,
    "numbers": lambda rng: words.numbers(rng, _NUMBER_DIGITS),
    "uuids": words.uuids,
}


@dataclass(frozen=True)
class Needles:
    """One variant; a task (`sample.Task`) when called.

    `keys` keys have `values_per_key` values each. With `together` one question asks for all keys,
    else one question for each key. Only in a haystack of needles are there more keys than
    questions.
    """

    haystack: Literal["noise", "prose", "needles"]
    key: Content = "words"
    value: Content = "numbers"
    keys: int = 1
    values_per_key: int = 1
    together: bool = False

    def __call__(self, rng: random.Random, budget: Budget) -> Draft:
        """A haystack as long as the budget and its questions, in RULER's words."""
        keys, values = SUPPLIES[self.key](rng), SUPPLIES[self.value](rng)
        hidden = {
            words.take(keys, 1)[0]: words.take(values, self.values_per_key)
            for _ in range(self.keys)
        }
        needles = [self._needle(key, value) for key, own in hidden.items() for value in own]
        pieces = self._pieces(rng, keys, values)
        between = " " if self.haystack == "prose" else "\n"
        text = hide_needles(rng, pieces, needles, between).fill(budget, self._head(), "\n")
        asked = [hidden] if self.together else [{key: own} for key, own in hidden.items()]
        return Draft(text, tuple(self._question(some) for some in asked))

    def _pieces(
        self, rng: random.Random, keys: Iterator[str], values: Iterator[str]
    ) -> Iterator[str]:
        if self.haystack == "needles":
            return (self._needle(key, value) for key, value in zip(keys, values, strict=True))
        return noise() if self.haystack == "noise" else prose(random.Random(rng.getrandbits(64)))

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _asks_for_many(self) -> bool:
        return self.together or self.values_per_key > 1

    def _head(self) -> str:
        many = self.value if self._asks_for_many() else self.value[:-1]
        hidden = (
            f"Some special magic {many} are"
            if self._asks_for_many()
            else f"A special magic {many} is"
        )
        return (
            f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the {many} afterwards.\n"
        )

    def _question(self, asked: dict[str, list[str]]) -> Question:
        *first, last = asked
        names = f"{', '.join(first)}, and {last}" if first else last
        if self._asks_for_many():
            about, ask, verb = f"special magic {self.value} for {names}", "What are all the", "are"
        else:
            about, ask, verb = f"special magic {self.value[:-1]} for {names}", "What is the", "is"
        about += " mentioned in the provided text"
        evidence = tuple(self._needle(key, value) for key, own in asked.items() for value in own)
        answers = tuple(value for own in asked.values() for value in own)
        return Question(
            f"{ask} {about}? The {about} {verb}", answers, "all", _REPLY_TOKENS, evidence
        )


NEEDLES: dict[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", value="uuids"),
    "niah_multikey_1": Needles("prose", keys=4),
    "niah_multikey_2": Needles("needles", keys=4),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids", keys=4),
    "niah_multivalue": Needles("prose", values_per_key=4),
    "niah_multiquery": Needles("prose", keys=4, together=True),
}
