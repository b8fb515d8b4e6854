"""Tables of docs/accuracy.md about several needles, asked for alone, and about what sealing chunk by chunk costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.accuracy.books import AVERAGED, Books, table
from tangram.compress.profile import Scope
from tangram.lab.accuracy.methods import Method, MethodName
from tangram.lab.accuracy.results import AnyCell, Cell

# Tasks that hide several needles and are asked on their own, by suite: in the same few lines again and again, in prose.
NEEDLES = {
    "multiturn": ("noise", {"needles"}),
    "ruler": ("prose", {"niah_multikey_1", "niah_multivalue", "niah_multiquery"}),
}
_AT = (0.5, 0.3)
_LARGER = 2048


def whole_suites(cells: Sequence[AnyCell]) -> list[AnyCell]:
    """Those that were asked all tasks of a suite."""
    return [cell for cell in cells if not _of_needles(cell)]


def _of_needles(cell: AnyCell) -> bool:
    return (
        isinstance(cell, Cell) and cell.setting.suite in NEEDLES and set(cell.by_task) == NEEDLES[cell.setting.suite][1]
    )


def needles(cells: Sequence[AnyCell]) -> str:
    """Of questions that were asked about needles alone; methods whose heads compete, in both scopes.

    "uniform, one-shot" gives every head the same share of the whole context at once; "static − dynamic" is in the scope
    that the scorer is served in.
    """
    alone = [cell for cell in cells if _of_needles(cell)]
    found = [_hidden(alone, suite, retention) for retention in _AT for suite in NEEDLES]
    return "\n\n".join(text for text in found if text)


def _hidden(cells: Sequence[AnyCell], suite: str, retention: float) -> str:
    books = Books(cells, (suite,))
    asked: tuple[tuple[MethodName, Scope | None], ...] = (
        ("full", None), ("uniform", None), ("static", None), ("dynamic", "layer"), ("dynamic", "model"),
        ("one-shot", "layer"), ("one-shot", "model"),
    )  # fmt: skip
    lines = []
    for scorer in books.scorers:
        methods = [_scoped(books.plain(name, scorer, retention), scope) for name, scope in asked]
        uniform, static = methods[1:3]
        at_once = replace(uniform, chunk_tokens=methods[-1].chunk_tokens) if uniform and methods[-1] else None
        if any(books.of(method) for method in methods[1:]):
            less = [books.less(static, other) for other in (uniform, books.plain("dynamic", scorer, retention))]
            lines.append([scorer, *map(books.score, [*methods, at_once]), *less])
    titles = [name if scope is None else f"{name}, {scope}" for name, scope in asked]
    titles += ["uniform, one-shot", "static − uniform", "static − dynamic"]
    return table([f"in {NEEDLES[suite][0]}, ρ {retention:g}, %", *titles], lines, labels=1)


def _scoped(method: Method | None, scope: Scope | None) -> Method | None:
    """The method whose heads compete within `scope`, or as it is."""
    return method if method is None or scope is None else replace(method, scope=scope)


def sealed(cells: Sequence[AnyCell]) -> str:
    """A table a ρ, a line a scorer: dynamic less one-shot, of both suites, each, needles alone, and longer chunks."""
    alone = [cell for cell in cells if _of_needles(cell)]
    rest = whole_suites(cells)
    parts = {"both": Books(rest), **{suite: Books(rest, (suite,)) for suite in AVERAGED}}
    parts |= {f"needles in {NEEDLES[suite][0]}": Books(alone, (suite,)) for suite in NEEDLES}
    titles = [*parts, f"both, C {_LARGER}", f"ruler, C {_LARGER}"]
    found = []
    for retention in parts["both"].retentions:
        lines = []
        for scorer in parts["both"].scorers:
            methods = [(books, *(books.plain(name, scorer, retention) for name in ("dynamic", "one-shot")))
                       for books in parts.values()]  # fmt: skip
            methods += [(books, dynamic and replace(dynamic, chunk_tokens=_LARGER), at_once)
                        for books, dynamic, at_once in (methods[0], methods[1])]  # fmt: skip
            lines.append([scorer, *(books.less(dynamic, at_once) for books, dynamic, at_once in methods)])
        head = [f"dynamic − one-shot, ρ {retention:g}, points ± standard error", *titles]
        found.append(table(head, lines, labels=1))
    return "\n\n".join(text for text in found if text)
