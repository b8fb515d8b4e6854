"""Questions over documents, most of them distractors, after RULER's two QA tasks.

They are in arXiv 2404.06654, Section 3. RULER takes SQuAD and HotpotQA. Here people, towns and
rivers are invented, so that no model knows the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tangram_lab.accuracy import words
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.haystack import hide_needles
from tangram_lab.accuracy.sample import Draft, Question

_ASKED = 3
_REPLY_TOKENS = 32
_TOLD = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
_TRADES = (
    "baker",
    "bookbinder",
    "botanist",
    "carpenter",
    "cartographer",
    "clockmaker",
    "composer",
    "dyer",
    "glassblower",
    "judge",
    "painter",
    "printer",
    "sculptor",
    "surgeon",
    "teacher",
    "weaver",
)
_REMARKS = (
    "The letters of those years are kept in a private collection.",
    "Little else is known with certainty, and most records were lost in a fire.",
    "A small exhibition is held there every other summer.",
    "Two biographers disagree about the details, and neither gives a source.",
    "A plaque was put up long afterwards, with a mistake in the date.",
    "Contemporaries praised the patience with which the work was done.",
    "The family moved several times before the trade brought in enough to live on.",
    "Visitors are often surprised by how quiet it is outside the season.",
)

# A document, and the question that it answers, alone or with the document before it.
Fact = tuple[tuple[str, ...], str, str]


def single_hop(rng: random.Random, budget: Budget) -> Draft:
    """Three questions, each answered by one sentence of one document."""
    return _draft(rng, budget, _births(rng))


def multi_hop(rng: random.Random, budget: Budget) -> Draft:
    """Three questions, each answered by two documents: a person's town, and that town's river."""
    return _draft(rng, budget, _rivers(rng))


def _births(rng: random.Random) -> Iterator[Fact]:
    for person, town in zip(words.people(rng), words.towns(rng), strict=True):
        born = (
            f"{person} was a {rng.choice(_TRADES)} who was born in {town} in "
            f"{rng.randint(1500, 1899)}."
        )
        yield (f"{person}\n{born} {_remarks(rng)}",), f"In which town was {person} born?", town


def _rivers(rng: random.Random) -> Iterator[Fact]:
    for person, town, river in zip(
        words.people(rng), words.towns(rng), words.rivers(rng), strict=True
    ):
        lived = (
            f"{person} was a {rng.choice(_TRADES)} and lived in {town} until "
            f"{rng.randint(1500, 1899)}."
        )
        place = f"{town} is a town of {rng.randint(1, 89)},000 people on the river {river}."
        documents = (f"{person}\n{lived} {_remarks(rng)}", f"{town}\n{place} {_remarks(rng)}")
        yield documents, f"On which river is the town where {person} lived?", river


def _remarks(rng: random.Random) -> str:
    return " ".join(rng.sample(_REMARKS, rng.randint(1, 3)))


def _draft(rng: random.Random, budget: Budget, facts: Iterator[Fact]) -> Draft:
    asked = [next(facts) for _ in range(_ASKED)]
    hidden = [document for documents, _, _ in asked for document in documents]
    distractors = (document for documents, _, _ in facts for document in documents)
    haystack = hide_needles(rng, distractors, hidden, _SEPARATOR)
    write = _number(haystack.text)
    text = write(budget.fill(write))
    return Draft(text, tuple(_question(*fact) for fact in asked))


_SEPARATOR = "\n\n"


def _number(text: Callable[[int], str]) -> Callable[[int], str]:
    """The same documents under RULER's frame, numbered from 1."""

    def write(count: int) -> str:
        documents = text(count).split(_SEPARATOR)
        listed = _SEPARATOR.join(
            f"Document {number}:\n{document}" for number, document in enumerate(documents, 1)
        )
        return f"{_TOLD}\n\nThe following are given documents.\n\n{listed}\n\n"

    return write


def _question(documents: tuple[str, ...], ask: str, answer: str) -> Question:
    return Question(
        f"{_TOLD}\n\nQuestion: {ask} Answer:", (answer,), "any", _REPLY_TOKENS, documents
    )
