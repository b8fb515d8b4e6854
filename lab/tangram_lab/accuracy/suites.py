"""The suites of `tangram eval`, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tangram.errors import ConfigError
from tangram_lab.accuracy import locomo, multiturn, ruler
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.sample import Sample, Task, write_sample

MIN_CONTEXT_TOKENS = 512
SAMPLES = 52  # four of each of RULER's tasks


class Suite(Protocol):
    """Makes samples. Equal arguments give equal samples, and fewer samples are the first of more.

    `context_tokens` bounds every context, counted by `count_tokens`. Generated contexts come within
    5 % of it or within one piece of their text, those read from files within one session. `samples`
    None is `SAMPLES` for generated ones, and all there are for those read from files. `tasks`: the
    suite's tasks, all without it. `max_questions`: the maximum number of questions on a context,
    all without it. `path`: for suites that are read from files, and only for those.

    Raises `ConfigError`, which names the argument, its value, and the limit.
    """

    def __call__(
        self,
        count_tokens: Callable[[str], int],
        context_tokens: int,
        samples: int | None = None,
        seed: int = 0,
        *,
        tasks: Sequence[str] | None = None,
        max_questions: int | None = None,
        path: Path | None = None,
    ) -> list[Sample]:
        """The samples."""
        ...


def _generate(suite: str, known: Mapping[str, Task]) -> Suite:
    """Tasks take turns, so that their numbers of samples differ by one at most."""

    def make(
        count_tokens: Callable[[str], int],
        context_tokens: int,
        samples: int | None = None,
        seed: int = 0,
        *,
        tasks: Sequence[str] | None = None,
        max_questions: int | None = None,
        path: Path | None = None,
    ) -> list[Sample]:
        if path is not None:
            raise ConfigError(
                f"path is {path}, but suite {suite} makes its own texts: leave it out"
            )
        _check(context_tokens, samples, max_questions)
        chosen = _choose(suite, tasks, known)
        budget = Budget(count_tokens, context_tokens)
        count = SAMPLES if samples is None else samples
        turns = (divmod(index, len(chosen)) for index in range(count))
        made = [
            write_sample(suite, chosen[task], known[chosen[task]], budget, seed, number)
            for number, task in turns
        ]
        return [_with_questions(sample, max_questions) for sample in made]

    return make


def _locomo(
    count_tokens: Callable[[str], int],
    context_tokens: int,
    samples: int | None = None,
    seed: int = 0,
    *,
    tasks: Sequence[str] | None = None,
    max_questions: int | None = None,
    path: Path | None = None,
) -> list[Sample]:
    """Windows of conversations in a random order; `tasks` are categories of questions."""
    if path is None:
        raise ConfigError(
            f"path is missing: suite {locomo.SUITE} is read from LoCoMo's files, name one or a "
            "folder"
        )
    _check(context_tokens, samples, max_questions)
    categories = _choose(locomo.SUITE, tasks, locomo.CATEGORIES.values())
    found = locomo.read_samples(path, Budget(count_tokens, context_tokens), seed)
    of_categories = [
        replace(sample, questions=questions)
        for sample in found
        if (questions := tuple(one for one in sample.questions if one.category in categories))
    ]
    if not of_categories:
        raise ConfigError(
            f"tasks is {', '.join(categories)}, of which the conversations of {path} ask nothing "
            f"in contexts of at most {context_tokens} tokens: name others, or raise context_tokens"
        )
    if samples is not None and samples > len(of_categories):
        raise ConfigError(
            f"samples is {samples}, the conversations of {path} give {len(of_categories)} contexts "
            f"of at most {context_tokens} tokens: ask for {len(of_categories)} or fewer, or for "
            "shorter contexts, name more files, or leave samples out for all of them"
        )
    random.Random(f"{locomo.SUITE}/{seed}").shuffle(of_categories)
    return [_with_questions(sample, max_questions) for sample in of_categories[:samples]]


def _check(context_tokens: int, samples: int | None, max_questions: int | None) -> None:
    if context_tokens < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"context_tokens is {context_tokens}, it must be at least {MIN_CONTEXT_TOKENS}"
        )
    if samples is not None and samples < 1:
        raise ConfigError(f"samples is {samples}, it must be at least 1")
    if max_questions is not None and max_questions < 1:
        raise ConfigError(f"max_questions is {max_questions}, it must be at least 1")


def _choose(suite: str, tasks: Sequence[str] | None, known: Collection[str]) -> list[str]:
    if tasks is None:
        return list(known)
    if not tasks:
        raise ConfigError(f"tasks is empty, it must name some of suite {suite}: {', '.join(known)}")
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"tasks has {task!r}, suite {suite} has {', '.join(known)}: name one of these"
            )
    return list(dict.fromkeys(tasks))


def _with_questions(sample: Sample, most: int | None) -> Sample:
    return replace(sample, questions=sample.questions[:most])


SUITES: dict[str, Suite] = {
    "ruler": _generate("ruler", ruler.TASKS),
    "multiturn": _generate("multiturn", multiturn.TASKS),
    locomo.SUITE: _locomo,
}
