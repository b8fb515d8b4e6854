"""Runs a grid: every method answers every suite. Each cell is kept as soon as it is measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from tangram_lab.accuracy.grading import score_reply
from tangram_lab.accuracy.locomo import SUITE as LOCOMO
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.passages import Passages
from tangram_lab.accuracy.results import (
    AnsweredSample,
    AnyCell,
    Cell,
    Fidelity,
    FidelityCell,
    GradedAnswer,
    Results,
    Score,
    Setting,
)
from tangram_lab.accuracy.sample_prompts import SamplePrompts, SuitePrompts
from tangram_lab.accuracy.work import count_work

SUITES_IN_WORDS = {
    "fidelity": "real text",
    "locomo": "questions about long conversations (locomo)",
    "multiturn": "several questions about one text (multiturn)",
    "ruler": "questions about long texts (ruler)",
}
_REPLY_CHARACTERS = 240  # of each reply in the file


@dataclass(frozen=True)
class Reply:
    """One reply, and the KV bytes held when it ended."""

    text: str
    tokens: int
    held_bytes: int
    uncompressed_bytes: int


# Asks all questions of the samples with a method; replies by sample and question. It reports the
# work that is done as it goes, in prompt tokens (work.py).
Ask = Callable[[Method, Sequence[SamplePrompts], Callable[[int], None]], list[tuple[Reply, ...]]]

# Reads passages with a method and reports the work of each; the fidelity by passage.
Read = Callable[[Passages, Callable[[int], None]], tuple[Fidelity, ...]]

# The recall of evidence of each question, by sample; None where an answer needs all of the context.
Recalls = tuple[tuple[float | None, ...], ...]


class MethodBench(Protocol):
    """A model that runs any method."""

    def basis(self, method: Method) -> Mapping[str, Any]:
        """The other inputs of the answers besides method and setting, as JSON."""
        ...

    def environment(self) -> Mapping[str, Any]:
        """Machine, versions and commit."""
        ...

    def open(self, methods: Sequence[Method]) -> AbstractContextManager[Ask]:
        """Load an engine for `methods` that can share one. It is freed when the context ends."""
        ...

    def reading(self, method: Method) -> AbstractContextManager[Read]:
        """The same for given texts, which are compared with the full cache."""
        ...

    def recall(self, method: Method, prompts: SuitePrompts) -> Recalls:
        """The share that `method` keeps of each question's evidence. No engine may be open."""
        ...


class Watch(Protocol):
    """Whoever looks on."""

    def expect(self, tokens: int) -> None:
        """Set the work of all parts, in prompt tokens."""
        ...

    def turns_to(self, what: str) -> None:
        """Show the current work."""
        ...

    def advance(self, tokens: int) -> None:
        """Count this much more work as done."""
        ...


@dataclass(frozen=True)
class PlannedCell:
    """A cell to measure: a method, the prompts that it answers or reads, and the settings."""

    method: Method
    prompts: SuitePrompts | Passages
    setting: Setting
    basis: Mapping[str, Any]

    @property
    def questions(self) -> int:
        """The number of questions or passages."""
        return self.prompts.count

    @property
    def work(self) -> int:
        """What it computes, in prompt tokens."""
        return count_work(self.prompts)

    def find_in(self, results: Results) -> AnyCell | None:
        """The cell in `results`, if it has been measured already."""
        return next(
            (cell for cell in results.cells if cell.same(self.method, self.setting, self.basis)),
            None,
        )


def plan_cells(
    bench: MethodBench,
    methods: Sequence[Method],
    suites: Sequence[tuple[SuitePrompts | Passages, Setting]],
) -> list[PlannedCell]:
    """Every method with every suite, all suites of a method one after the other."""
    return [
        PlannedCell(method, *suite, bench.basis(method)) for method in methods for suite in suites
    ]


def run(
    bench: MethodBench, grid: Sequence[PlannedCell], results: Results, path: Path, watch: Watch
) -> list[AnyCell]:
    """The cells of `grid`, in its order. Cells that `results` has are not measured again.

    `path` is rewritten after each cell, so an interrupted run loses one cell at most. Recall of
    evidence comes first, since one pass over the contexts serves many methods.
    """
    missing = [plan for plan in grid if plan.find_in(results) is None]
    recalls = _recalls(bench, missing, watch)
    names = name_methods([plan.method for plan in grid])
    for _, plans in groupby(missing, key=lambda plan: plan.method.company):
        for cell in _cells(bench, list(plans), recalls, names, watch):
            results.cells.append(cell)
            results.save(path)
    found = [plan.find_in(results) for plan in grid]
    return [cell for cell in found if cell is not None]


def name_methods(methods: Sequence[Method]) -> dict[Method, str]:
    """Each method in words: by its ρ alone, unless another one has the same."""
    ratios = Counter(method.kv_retention for method in dict.fromkeys(methods))
    return {
        method: "everything kept"
        if method.name == "full"
        else f"ρ {method.kv_retention:g}"
        if ratios[method.kv_retention] == 1
        else method.title
        for method in methods
    }


def _recalls(
    bench: MethodBench, plans: Sequence[PlannedCell], watch: Watch
) -> Mapping[tuple[Method, str], Recalls]:
    """Recall by method and digest of LoCoMo's prompts. Equal scores are computed once."""
    asked = [(one.method, one.prompts) for one in plans if isinstance(one.prompts, SuitePrompts)]
    rows = [(method, prompts) for method, prompts in asked if prompts.suite == LOCOMO]
    found = dict[tuple[Method, str], Recalls]()
    for method, prompts in sorted(
        rows, key=lambda row: (row[1].sha256, row[0].scorer or "", row[0].chunk_tokens or 0)
    ):
        watch.turns_to(f"{method.title}: recall of evidence")
        found[method, prompts.sha256] = bench.recall(method, prompts)
    return found


def _cells(
    bench: MethodBench,
    plans: Sequence[PlannedCell],
    recalls: Mapping[tuple[Method, str], Recalls],
    names: Mapping[Method, str],
    watch: Watch,
) -> Iterator[AnyCell]:
    """The cells of methods that share an engine: first questions, then texts.

    Only what each part needs is open.
    """
    asked = [(plan, plan.prompts) for plan in plans if isinstance(plan.prompts, SuitePrompts)]
    given = [(plan, plan.prompts) for plan in plans if isinstance(plan.prompts, Passages)]
    if asked:
        methods = list(dict.fromkeys(plan.method for plan, _ in asked))
        watch.turns_to(f"{'; '.join(names[method] for method in methods)}: starting an engine")
        with bench.open(methods) as ask:
            for plan, prompts in asked:
                watch.turns_to(f"{names[plan.method]}: answering {SUITES_IN_WORDS[prompts.suite]}")
                begin = time.perf_counter()
                replies = ask(plan.method, prompts.samples, watch.advance)
                seconds, known = (
                    time.perf_counter() - begin,
                    recalls.get((plan.method, prompts.sha256)),
                )
                samples = _grade(prompts.samples, replies, known)
                yield _cell(
                    plan,
                    prompts.samples,
                    samples,
                    _footprint(replies),
                    seconds,
                    bench.environment(),
                )
    for plan, passages in given:
        with bench.reading(plan.method) as read:
            watch.turns_to(f"{names[plan.method]}: reading {SUITES_IN_WORDS[passages.suite]}")
            begin = time.perf_counter()
            found = read(passages, watch.advance)
            yield FidelityCell(
                method=plan.method,
                setting=plan.setting,
                basis=dict(plan.basis),
                passages=found,
                seconds=time.perf_counter() - begin,
                environment=dict(bench.environment()),
            )


def _cell(
    plan: PlannedCell,
    prompts: Sequence[SamplePrompts],
    samples: tuple[AnsweredSample, ...],
    footprint: float,
    seconds: float,
    environment: Mapping[str, Any],
) -> Cell:
    tasks = dict.fromkeys(sample.task for sample in samples)
    of_task = {task: [sample.score for sample in samples if sample.task == task] for task in tasks}
    return Cell(
        method=plan.method,
        setting=plan.setting,
        basis=dict(plan.basis),
        score=Score.of([sample.score for sample in samples]),
        by_task={task: Score.of(scores) for task, scores in of_task.items()},
        footprint=footprint,
        filler_tokens=sum(asked.filler_tokens for asked in prompts) / len(prompts),
        seconds=seconds,
        environment=dict(environment),
        samples=samples,
    )


def _grade(
    prompts: Sequence[SamplePrompts], replies: Sequence[Sequence[Reply]], recalls: Recalls | None
) -> tuple[AnsweredSample, ...]:
    known = recalls or tuple((None,) * len(own) for own in replies)
    return tuple(_grade_sample(*one) for one in zip(prompts, replies, known, strict=True))


def _grade_sample(
    asked: SamplePrompts, replies: Sequence[Reply], recalls: Sequence[float | None]
) -> AnsweredSample:
    answers = tuple(
        GradedAnswer(
            score=score_reply(question, reply.text),
            reply=reply.text[:_REPLY_CHARACTERS],
            prompt_tokens=len(prompt),
            reply_tokens=reply.tokens,
            category=question.category,
            evidence_recall=recall,
        )
        for question, prompt, reply, recall in zip(
            asked.sample.questions, asked.prompts, replies, recalls, strict=True
        )
    )
    return AnsweredSample(task=asked.sample.task, number=asked.sample.number, answers=answers)


def _footprint(by_sample: Sequence[Sequence[Reply]]) -> float:
    replies = [reply for own in by_sample for reply in own]
    held = sum(reply.held_bytes for reply in replies)
    return held / sum(reply.uncompressed_bytes for reply in replies)
