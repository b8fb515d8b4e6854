"""The tables of docs/accuracy.md, from cells: what each choice costs, as means over suites and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from bench.accuracy.books import AVERAGED, NONE, Books, columns, table
from tangram.compress.profile import Scope
from tangram.evaluate.locomo import CATEGORIES
from tangram.evaluate.methods import Method, MethodName
from tangram.evaluate.report import percent, plain
from tangram.evaluate.results import AnyCell, Cell, FidelityCell, Score

# Tasks that hide several needles and are asked on their own, by suite: in the same few lines again and again, in prose.
NEEDLES = {
    "multiturn": ("noise", {"needles"}),
    "ruler": ("prose", {"niah_multikey_1", "niah_multivalue", "niah_multiquery"}),
}


def tables(cells: Sequence[AnyCell]) -> str:
    """Every table for which there are cells, with its title."""
    titled = [
        ("Scores", _scores), ("Static budgets beside the dynamic method", _against("static", "dynamic")),
        ("Static budgets beside equal ones", _against("static", "uniform")),
        ("Several needles at ρ 0.3", _needles),
        ("Sealed chunk by chunk, beside the whole context at once", _against("dynamic", "one-shot")),
        ("α", _alphas), ("Chunks", _chunks), ("Which heads compete", _scopes), ("Windows and sinks", _windows),
        ("The end of the context left raw", _tails), ("What is expected of real text", _fidelity),
        ("Long conversations (LoCoMo)", _locomo),
    ]  # fmt: skip
    rest = _rest(cells)
    sections = [(title, make(cells if make is _needles else rest)) for title, make in titled]
    return "\n".join(f"### {title}\n\n{text}\n" for title, text in sections if text)


def plainly(cells: Sequence[AnyCell]) -> list[AnyCell]:
    """Those of methods with everything at its default."""
    books, rest = Books(_rest(cells)), _rest(cells)
    return [
        cell
        for cell in rest
        if cell.method == books.plain(cell.method.name, cell.method.scorer or "", cell.method.kv_retention)
    ]


def _scores(cells: Sequence[AnyCell]) -> str:
    """A table a suite, and one of their means."""
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic", "one-shot")
    found = []
    for suites in (*((suite,) for suite in AVERAGED), AVERAGED):
        books = Books(cells, suites)
        full = books.score(Method("full"))
        title = f"{suites[0]}, % ± standard error" if len(suites) == 1 else "mean of both"
        lines = [["full", NONE, *[full] * len(books.retentions)]] + [
            [name, scorer, *(books.score(books.plain(name, scorer, ratio)) for ratio in books.retentions)]
            for scorer in books.scorers
            for name in names
        ]
        found.append(table([title, "scorer", *columns(books)], lines))
    return "\n\n".join(text for text in found if text)


def _against(name: MethodName, other: MethodName) -> Callable[[Sequence[AnyCell]], str]:
    """A line a scorer: the one less the other, mean over suites."""

    def make(cells: Sequence[AnyCell]) -> str:
        books = Books(cells)
        lines = [
            [
                scorer,
                *(books.less(books.plain(name, scorer, ratio), books.plain(other, scorer, ratio))
                  for ratio in books.retentions),
            ]
            for scorer in books.scorers
        ]  # fmt: skip
        return table([f"{name} − {other}, points ± standard error", *columns(books)], lines)

    return make


def _needles(cells: Sequence[AnyCell]) -> str:
    """Of questions that were asked about needles alone; methods whose heads compete, in both scopes.

    "uniform, one-shot" gives every head the same share of the whole context at once.
    """
    found = [_hidden([cell for cell in cells if _of_needles(cell)], suite) for suite in NEEDLES]
    return "\n\n".join(text for text in found if text)


def _hidden(cells: Sequence[AnyCell], suite: str) -> str:
    books, retention = Books(cells, (suite,)), 0.3
    asked: tuple[tuple[MethodName, Scope | None], ...] = (
        ("full", None), ("uniform", None), ("static", None), ("dynamic", "layer"), ("dynamic", "model"),
        ("one-shot", "layer"), ("one-shot", "model"),
    )  # fmt: skip
    lines = []
    for scorer in books.scorers:
        methods = [_scoped(books.plain(name, scorer, retention), scope) for name, scope in asked]
        uniform, static = methods[1:3]
        at_once = replace(uniform, chunk_tokens=methods[-1].chunk_tokens) if uniform and methods[-1] else None
        lines.append([scorer, *map(books.score, [*methods, at_once]), books.less(static, uniform)])
    titles = [name if scope is None else f"{name}, {scope}" for name, scope in asked]
    titles.append("uniform, one-shot")
    return table([f"in {NEEDLES[suite][0]}", *titles, "static − uniform"], lines).replace(
        "| --- | --- | ---: |", "| --- | ---: | ---: |", 1
    )


def _of_needles(cell: AnyCell) -> bool:
    return (
        isinstance(cell, Cell) and cell.setting.suite in NEEDLES and set(cell.by_task) == NEEDLES[cell.setting.suite][1]
    )


def _rest(cells: Sequence[AnyCell]) -> list[AnyCell]:
    """Those that were asked whole suites."""
    return [cell for cell in cells if not _of_needles(cell)]


def _scoped(method: Method | None, scope: Scope | None) -> Method | None:
    """The method whose heads compete within `scope`, or as it is."""
    return method if method is None or scope is None else replace(method, scope=scope)


def _varied(
    cells: Sequence[AnyCell], title: str, lines: Callable[[Books], Iterable[tuple[str, str, Method]]], **books: bool
) -> str:
    """Scores of changed methods, mean over suites: `lines` gives a name, a scorer and the method at any ρ."""
    own = Books(cells, **books)
    shown = [
        [name, scorer, *(own.score(_at(method, ratio)) for ratio in own.retentions)]
        for name, scorer, method in lines(own)
    ]
    return table([title, "scorer", *columns(own)], shown)


def _at(method: Method, retention: float) -> Method:
    return method if method.name == "full" else replace(method, kv_retention=retention)


def _changed(books: Books, names: Sequence[MethodName], **changes: object) -> list[tuple[str, str, Method]]:
    found = []
    for scorer in books.scorers:
        for name in names:
            method = books.plain(name, scorer, 0.5)
            assert method is not None
            found.append((name, scorer, replace(method, **changes)))  # type: ignore[arg-type]
    return found


def _alphas(cells: Sequence[AnyCell]) -> str:
    def lines(books: Books) -> list[tuple[str, str, Method]]:
        found = [
            (f"static, α {alpha:g}", scorer, method)
            for alpha in (0.0, 1.0, 2.0)
            for _, scorer, method in _changed(books, ["static"], alpha=alpha)
        ]
        return sorted(found, key=lambda line: books.scorers.index(line[1]))

    return _varied(cells, "mean of both suites, %", lines)


def _chunks(cells: Sequence[AnyCell]) -> str:
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")

    def lines(books: Books) -> list[tuple[str, str, Method]]:
        found = [
            (f"{name}, C {chunk}", scorer, method)
            for chunk in (256, 512, 1024, 2048)
            for name, scorer, method in _changed(books, names, chunk_tokens=chunk)
        ]
        return sorted(found, key=lambda line: (books.scorers.index(line[1]), line[0].split(",")[0]))

    return _varied(cells, "mean of both suites, %", lines)


def _scopes(cells: Sequence[AnyCell]) -> str:
    names: tuple[MethodName, ...] = ("static", "dynamic", "one-shot")

    def lines(books: Books) -> list[tuple[str, str, Method]]:
        found = [
            (f"{name}, {scope}", scorer, method)
            for scope in ("layer", "model")
            for name, scorer, method in _changed(books, names, scope=scope)
        ]
        return sorted(found, key=lambda line: (books.scorers.index(line[1]), line[0]))

    return _varied(cells, "mean of both suites, %", lines)


def _windows(cells: Sequence[AnyCell]) -> str:
    kept = {(cell.method.sink_tokens, cell.method.window_tokens) for cell in cells if cell.method.name == "static"}
    if len(kept) < 2:
        return ""

    def lines(books: Books) -> list[tuple[str, str, Method]]:
        return [
            (f"static, sinks {sinks}, window {'C / 64' if window is None else window}", scorer, method)
            for sinks, window in sorted(kept, key=lambda one: (-(one[0] or 0), -1 if one[1] is None else one[1]))
            for _, scorer, method in _changed(books, ["static"], sink_tokens=sinks, window_tokens=window)
        ]

    return _varied(cells, "mean of both suites, %", lines)


def _tails(cells: Sequence[AnyCell]) -> str:
    def lines(books: Books) -> list[tuple[str, str, Method]]:
        return [("full", NONE, Method("full")), *_changed(books, ["uniform", "static"])]

    return _varied(cells, "mean of both suites, %", lines, aligned=False)


def _fidelity(cells: Sequence[AnyCell]) -> str:
    books = Books(cells, ("fidelity",))
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")
    found = []
    for title, shown in (("KL from full, nats", lambda cell: plain(cell.divergence, 4)),
                         ("top-1 agreement, %", lambda cell: percent(cell.agreement))):  # fmt: skip
        lines = [
            [name, scorer, *(shown(own[0]) if own and isinstance(own[0], FidelityCell) else NONE
             for own in (books.of(books.plain(name, scorer, ratio)) for ratio in books.retentions))]
            for scorer in books.scorers for name in names
        ]  # fmt: skip
        found.append(table([title, "scorer", *columns(books)], lines))
    return "\n\n".join(text for text in found if text)


def _locomo(cells: Sequence[AnyCell]) -> str:
    """Apart: questions that the conversation answers, and those where "not mentioned" is right."""
    books = Books(cells, ("locomo",))
    found = (
        _asked(books, "F1 where the conversation answers, %", adversarial=False),
        _asked(books, "right where it does not, %", adversarial=True),
    )
    return "\n\n".join(text for text in found if text)


def _asked(books: Books, title: str, *, adversarial: bool) -> str:
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")

    def shown(method: Method | None) -> str:
        own = books.of(method)
        return percent(_of_kind(own[0], adversarial=adversarial)) if own and isinstance(own[0], Cell) else NONE

    lines = [["full", NONE, *[shown(Method("full"))] * len(books.retentions)]] + [
        [name, scorer, *(shown(books.plain(name, scorer, ratio)) for ratio in books.retentions)]
        for scorer in books.scorers
        for name in names
    ]
    return table([title, "scorer", *columns(books)], lines)


def _of_kind(cell: Cell, *, adversarial: bool) -> Score:
    """Over the samples that ask such questions, the means over those."""
    kept = [
        [answer.score for answer in one.answers if (answer.category == CATEGORIES[5]) == adversarial]
        for one in cell.samples
    ]
    return Score.of([fmean(scores) for scores in kept if scores])
