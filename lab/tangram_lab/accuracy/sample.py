"""Samples of a suite: one context, and questions that are each answered on the same cache of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tangram_lab.accuracy.budget import Budget

# The grading rules; `grading.py` defines each.
Grade = Literal["all", "any", "code", "exact", "f1", "f1_parts", "choice"]


@dataclass(frozen=True)
class Question:
    """One question and its right answers.

    `answers`: the parts of the answer (grade "all") or its spellings, never empty. `max_tokens`:
    the maximum length of a reply. `evidence`: the pieces of the context from which the answer
    follows, literally; empty if it follows from all of it, as in counting words. `category`: how
    reports divide a task's questions, if at all.
    """

    text: str
    answers: tuple[str, ...]
    grade: Grade
    max_tokens: int
    evidence: tuple[str, ...] = ()
    category: str | None = None


@dataclass(frozen=True)
class Sample:
    """One context and its questions.

    The prompt of each is `context + question.text`, in one user message. `number` counts the
    samples of a task from 0. `dropped_questions` counts questions of the source that no sample
    asks, because their evidence was cut apart or is missing (`locomo.py`).
    """

    suite: str
    task: str
    number: int
    context: str
    questions: tuple[Question, ...]
    dropped_questions: int = 0


@dataclass(frozen=True)
class Draft:
    """The output of a task: a `Sample` without its name and number."""

    context: str
    questions: tuple[Question, ...]


# Writes one context of at most the budget's length, and its questions. The same generator state
# gives the same draft.
Task = Callable[[random.Random, Budget], Draft]


def write_sample(
    suite: str, task: str, write: Task, budget: Budget, seed: int, number: int
) -> Sample:
    """Sample `number` of a task: a function of names, context length, seed and number.

    Raises `ConfigError` if the task's shortest text is longer than the budget.
    """
    # Seeded by text, which hashes the same in every process.
    draft = write(random.Random(f"{suite}/{task}/{budget.context_tokens}/{seed}/{number}"), budget)
    return Sample(suite, task, number, draft.context, draft.questions)
