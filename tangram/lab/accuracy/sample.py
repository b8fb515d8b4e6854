"""What a suite asks: one context, and questions that are each answered on the same cache of that
context.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tangram.lab.accuracy.budget import Budget

# What makes a reply right; `grading.py` says of each what it does.
Grade = Literal["all", "any", "code", "exact", "f1", "f1_parts", "choice"]


@dataclass(frozen=True)
class Question:
    """One question and what is right.

    `answers`: the parts of the answer (grade "all") or its spellings, never empty. `max_tokens`:
    the length of a reply at most. `evidence`: the pieces of the context, as they stand there, that
    the answer follows from; empty where it follows from all of it (counting words, say).
    `category`: what reports may part a task's questions by, if anything.
    """

    text: str
    answers: tuple[str, ...]
    grade: Grade
    max_tokens: int
    evidence: tuple[str, ...] = ()
    category: str | None = None


@dataclass(frozen=True)
class Sample:
    """One context and its questions; the prompt of each is `context + question.text`, in one user
    message.

    `number` counts the samples of a task from 0. `dropped_questions`: how many the source has that
    are asked nowhere, because what they rest on was cut apart or is missing, and that count here
    (`locomo.py`).
    """

    suite: str
    task: str
    number: int
    context: str
    questions: tuple[Question, ...]
    dropped_questions: int = 0


@dataclass(frozen=True)
class Draft:
    """What a task writes: a `Sample` that does not know yet what it is called."""

    context: str
    questions: tuple[Question, ...]


# Writes one context of at most the budget's length, and its questions; the same generator state
# gives the same draft.
Task = Callable[[random.Random, Budget], Draft]


def write_sample(
    suite: str, task: str, write: Task, budget: Budget, seed: int, number: int
) -> Sample:
    """Sample `number` of a task: a function of the names, the budget's context length, the seed and
    the number.

    Raises `ConfigError` if the task's shortest text is longer than the budget.
    """
    # Seeded by text, which hashes the same in every process.
    draft = write(random.Random(f"{suite}/{task}/{budget.context_tokens}/{seed}/{number}"), budget)
    return Sample(suite, task, number, draft.context, draft.questions)
