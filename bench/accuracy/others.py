"""Tables of docs/accuracy.md that are no means of two suites: task by task, of real text, of conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from bench.accuracy.books import AVERAGED, NONE, Books, columns, table
from tangram.lab.accuracy.locomo import CATEGORIES
from tangram.lab.accuracy.methods import Method, MethodName
from tangram.lab.accuracy.report import difference, percent, plain
from tangram.lab.accuracy.results import AnyCell, Cell, FidelityCell, Score

_NAMES: tuple[MethodName, ...] = ("uniform", "static", "dynamic")
_TASKS_AT = 0.5


def tasks(cells: Sequence[AnyCell]) -> str:
    """A table a suite: what the full cache can do of each task, and what static budgets can at ρ 0.5."""
    found = []
    for suite in AVERAGED:
        books = Books(cells, (suite,))
        methods = [Method("full"), *(books.plain("static", scorer, _TASKS_AT) for scorer in books.scorers)]
        own = [cell for method in methods for cell in books.of(method) if isinstance(cell, Cell)]
        if not own or own[0].method.name != "full":
            continue
        lines = [
            [task, str(score.samples), *(percent(cell.by_task[task]) for cell in own)]
            for task, score in own[0].by_task.items()
        ]
        titles = ["full", *(f"static, {cell.method.scorer}" for cell in own[1:])]
        found.append(table([f"{suite}, ρ {_TASKS_AT:g}, %", "samples", *titles], lines))
    return "\n\n".join(text for text in found if text)


def fidelity(cells: Sequence[AnyCell]) -> str:
    """Divergence, its differences passage by passage, top-1 agreement and perplexity."""
    books = Books(cells, ("fidelity",))

    def of_methods(title: str, shown: Callable[[FidelityCell], str], *, with_full: bool = False) -> str:
        def line(name: MethodName, scorer: str) -> list[str]:
            found = [books.of(books.plain(name, scorer, ratio)) for ratio in books.retentions]
            told = [shown(own[0]) if own and isinstance(own[0], FidelityCell) else NONE for own in found]
            return [name, scorer or NONE, *told]

        lines = [line(name, scorer) for scorer in books.scorers for name in _NAMES]
        return table([title, "scorer", *columns(books)], [line("full", ""), *lines] if with_full else lines)

    def less(name: MethodName, other: MethodName, scorer: str) -> list[str]:
        pairs = [(books.of(books.plain(name, scorer, ratio)), books.of(books.plain(other, scorer, ratio)))
                 for ratio in books.retentions]  # fmt: skip
        shown = [plain(difference(own[0], its[0]), 4, signed=True) if own and its else NONE for own, its in pairs]
        return [f"{name} − {other}", scorer, *shown]

    pairs: tuple[tuple[MethodName, MethodName], ...] = (("static", "dynamic"), ("static", "uniform"))
    found = [
        of_methods("KL from full, nats", lambda cell: plain(cell.divergence, 4)),
        table(["difference in KL, nats, passage by passage", "scorer", *columns(books)],
              [less(*pair, scorer) for scorer in books.scorers for pair in pairs]),
        of_methods("top-1 agreement, %", lambda cell: percent(cell.agreement)),
        of_methods("perplexity", lambda cell: plain(cell.perplexity, 2), with_full=True),
    ]  # fmt: skip
    return "\n\n".join(text for text in found if text)


def conversations(cells: Sequence[AnyCell]) -> str:
    """Apart: questions that the conversation answers, and those where "not mentioned" is right."""
    books = Books(cells, ("locomo",))
    found = (
        _asked(books, "F1 where the conversation answers, %", adversarial=False),
        _asked(books, "right where it does not, %", adversarial=True),
    )
    return "\n\n".join(text for text in found if text)


def _asked(books: Books, title: str, *, adversarial: bool) -> str:
    def shown(method: Method | None) -> str:
        own = books.of(method)
        return percent(_of_kind(own[0], adversarial=adversarial)) if own and isinstance(own[0], Cell) else NONE

    lines = [["full", NONE, *[shown(Method("full"))] * len(books.retentions)]] + [
        [name, scorer, *(shown(books.plain(name, scorer, ratio)) for ratio in books.retentions)]
        for scorer in books.scorers
        for name in _NAMES
    ]
    return table([title, "scorer", *columns(books)], lines)


def _of_kind(cell: Cell, *, adversarial: bool) -> Score:
    """Over the samples that ask such questions, the means over those."""
    kept = [
        [answer.score for answer in one.answers if (answer.category == CATEGORIES[5]) == adversarial]
        for one in cell.samples
    ]
    return Score.of([fmean(scores) for scores in kept if scores])
