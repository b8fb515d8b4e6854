"""The tables of docs/accuracy.md, from cells: what each choice costs, as means over suites and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from bench.accuracy.books import AVERAGED, NONE, Books, columns, table
from bench.accuracy.needles import needles, sealed, whole_suites
from bench.accuracy.others import conversations, fidelity, tasks
from tangram.lab.accuracy.methods import Method, MethodName
from tangram.lab.accuracy.results import AnyCell, Cell


def tables(cells: Sequence[AnyCell]) -> str:
    """Every table for which there are cells, with its title."""
    titled = [
        ("Scores", _scores), ("Task by task", tasks),
        ("Static budgets beside the dynamic method", _against("static", "dynamic")),
        ("Static budgets beside equal ones", _against("static", "uniform")),
        ("Several needles", needles), ("Sealed chunk by chunk, beside the whole context at once", sealed),
        ("α", _alphas), ("Chunks", _chunks), ("Which heads compete", _scopes), ("Windows and sinks", _windows),
        ("The end of the context left raw", _tails), ("What is expected of real text", fidelity),
        ("Long conversations (LoCoMo)", conversations),
    ]  # fmt: skip
    rest = whole_suites(cells)
    sections = [(title, make(cells if make in (needles, sealed) else rest)) for title, make in titled]
    return "\n".join(f"### {title}\n\n{text}\n" for title, text in sections if text)


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
        return table([f"{name} − {other}, points ± standard error", *columns(books)], lines, labels=1)

    return make


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

    def footprints(books: Books) -> str:
        """What a static budget holds, raw ends and replies included; it must not grow with α."""
        held = [
            [name, scorer, *(_held(books.of(_at(method, ratio))) for ratio in books.retentions)]
            for name, scorer, method in lines(books)
        ]
        return table(["KV bytes held, of everything's", "scorer", *columns(books)], held)

    scores = _varied(cells, "mean of both suites, %", lines)
    return f"{scores}\n\n{footprints(Books(cells))}" if scores else ""


def _held(found: Sequence[AnyCell]) -> str:
    footprints = [cell.footprint for cell in found if isinstance(cell, Cell) and cell.footprint is not None]
    return f"{fmean(footprints):.3f}" if footprints else NONE


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
