"""The tables of docs/accuracy.md, from cells: what each choice costs, as means over suites and paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.config import EngineConfig
from tangram.evaluate.methods import WITH_PROFILE, Method, MethodName
from tangram.evaluate.report import difference, percent, plain
from tangram.evaluate.results import AnyCell, Cell, FidelityCell, Score, Setting

AVERAGED = ("ruler", "multiturn")
# Where one of several facts stands among others that look like it, or several are asked for at once.
SEVERAL_NEEDLES = ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multiquery", "niah_multivalue")
_NONE = "–"
_TITLES: dict[str, str] = {
    "static": "static, α 2", "uniform": "uniform", "dynamic": "dynamic", "one-shot": "one-shot", "full": "full",
}  # fmt: skip

Found = Mapping[Method, Mapping[Setting, AnyCell]]


def tables(cells: Sequence[AnyCell]) -> str:
    """Every table for which there are cells, with its title."""
    titled = [
        ("Scores", _scores), ("Static budgets beside the dynamic method", _against("static", "dynamic")),
        ("Static budgets beside equal ones", _against("static", "uniform")),
        (f"Several needles at ρ 0.3 ({', '.join(SEVERAL_NEEDLES)})", _needles),
        ("Sealed chunk by chunk, beside the whole context at once", _against("dynamic", "one-shot")),
        ("α", _alphas), ("Chunks", _chunks), ("Which heads compete", _scopes), ("Windows and sinks", _windows),
        ("The end of the context left raw", _tails), ("What is expected of real text", _fidelity),
        ("Long conversations (LoCoMo)", _locomo),
    ]  # fmt: skip
    sections = [(title, make(cells)) for title, make in titled]
    return "\n".join(f"### {title}\n\n{text}\n" for title, text in sections if text)


def mean_score(cells: Sequence[Cell]) -> Score:
    """The mean over suites, each counting the same."""
    return _averaged([cell.score for cell in cells])


def mean_difference(pairs: Sequence[tuple[AnyCell, AnyCell]]) -> Score:
    """Of `pairs`, one a suite: the first less the second, sample by sample, then the mean over suites."""
    return _averaged([difference(*pair) for pair in pairs])


def _averaged(scores: Sequence[Score]) -> Score:
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = math.sqrt(sum(error * error for error in errors)) / len(scores) if len(errors) == len(scores) else None
    return Score(mean=fmean(score.mean for score in scores), stderr=stderr, samples=sum(one.samples for one in scores))


def plainly(cells: Sequence[AnyCell]) -> list[AnyCell]:
    """Those of methods with everything at its default."""
    books = _Books(cells)
    return [
        cell
        for cell in cells
        if cell.method == books.plain(cell.method.name, cell.method.scorer or "", cell.method.kv_retention)
    ]


class _Books:
    """Cells of one alignment and some suites, by method; a line of a table needs all of its suites."""

    def __init__(self, cells: Iterable[AnyCell], suites: Sequence[str] = AVERAGED, *, aligned: bool = True) -> None:
        kept = [cell for cell in cells if cell.setting.suite in suites and cell.setting.aligned == aligned]
        # Most were asked with one-shot among them; others have prompts of their own.
        counts: dict[Setting, int] = {}
        for cell in kept:
            counts[cell.setting] = counts.get(cell.setting, 0) + 1
        self.settings = [
            max((one for one in counts if one.suite == suite), key=lambda one: counts[one])
            for suite in suites
            if any(one.suite == suite for one in counts)
        ]
        self._found: dict[Method, dict[Setting, AnyCell]] = {}
        for cell in kept:
            self._found.setdefault(cell.method, {})[cell.setting] = cell
        methods = [cell.method for cell in kept if cell.method.scorer is not None]
        self.scorers = list(dict.fromkeys(method.scorer or "" for method in methods))
        self.retentions = sorted({method.kv_retention for method in methods}, reverse=True)

    def of(self, method: Method | None) -> list[AnyCell]:
        """One cell a suite; none if one is missing."""
        own = self._found.get(method, {}) if method is not None else {}
        found = [own[setting] for setting in self.settings if setting in own]
        return found if len(found) == len(self.settings) else []

    def plain(self, name: MethodName, scorer: str, retention: float) -> Method | None:
        """The method with everything else at its default; one-shot's chunk is the context."""
        if name == "full":
            return Method("full")
        chunk = self.settings[0].context_tokens if name == "one-shot" and self.settings else EngineConfig.chunk_tokens
        method = Method(name, retention, scorer, chunk, None if name == "uniform" else "model")
        if name == "static":
            method = replace(method, alpha=ALPHA)
        return replace(method, sink_tokens=SINK_TOKENS) if name in WITH_PROFILE else method

    def score(self, method: Method | None) -> str:
        return _worded(self.of(method))

    def less(self, method: Method | None, other: Method | None) -> str:
        pairs = list(zip(self.of(method), self.of(other), strict=False))
        return percent(mean_difference(pairs), signed=True) if pairs else _NONE


def _worded(found: Sequence[AnyCell]) -> str:
    return percent(mean_score([cell for cell in found if isinstance(cell, Cell)])) if found else _NONE


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Nothing where no line has a figure; `header` begins with what names a line, its columns end with ρ or a title."""
    kept = [line for line in lines if any(cell != _NONE and "±" in cell for cell in line)]
    if not kept:
        return ""
    labels = next((i for i, name in enumerate(header) if name.startswith("ρ")), 2)
    rule = ["---"] * labels + ["---:"] * (len(header) - labels)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *kept])


def _columns(books: _Books) -> list[str]:
    return [f"ρ {retention:g}" for retention in books.retentions]


def _scores(cells: Sequence[AnyCell]) -> str:
    """A table a suite, and one of their means."""
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic", "one-shot")
    found = []
    for suites in (*((suite,) for suite in AVERAGED), AVERAGED):
        books = _Books(cells, suites)
        full = books.score(Method("full"))
        title = f"{suites[0]}, % ± standard error" if len(suites) == 1 else "mean of both"
        lines = [["full", _NONE, *[full] * len(books.retentions)]] + [
            [_TITLES[name], scorer, *(books.score(books.plain(name, scorer, ratio)) for ratio in books.retentions)]
            for scorer in books.scorers
            for name in names
        ]
        found.append(_table([title, "scorer", *_columns(books)], lines))
    return "\n\n".join(table for table in found if table)


def _against(name: MethodName, other: MethodName) -> Callable[[Sequence[AnyCell]], str]:
    """A line a scorer: the one less the other, mean over suites."""

    def make(cells: Sequence[AnyCell]) -> str:
        books = _Books(cells)
        lines = [
            [
                scorer,
                *(books.less(books.plain(name, scorer, ratio), books.plain(other, scorer, ratio))
                  for ratio in books.retentions),
            ]
            for scorer in books.scorers
        ]  # fmt: skip
        return _table([f"{name} − {other}, points ± standard error", *_columns(books)], lines)

    return make


def _needles(cells: Sequence[AnyCell]) -> str:
    books, retention = _Books(cells, ("ruler",)), 0.3
    names: tuple[MethodName, ...] = ("full", "uniform", "static", "dynamic", "one-shot")
    lines = []
    for scorer in books.scorers:
        own = [books.of(books.plain(name, scorer, retention)) for name in names]
        samples = [
            {(one.task, one.number): one.score for one in found[0].samples if one.task in SEVERAL_NEEDLES}
            if found and isinstance(found[0], Cell)
            else {}
            for found in own
        ]
        shown = [percent(Score.of(list(found.values()))) if found else _NONE for found in samples]
        static, uniform = samples[2], samples[1]
        gain = Score.of([static[key] - uniform[key] for key in static]) if static and uniform else None
        lines.append([scorer, *shown, _NONE if gain is None else percent(gain, signed=True)])
    header = ["scorer", *(_TITLES[name] for name in names), "static − uniform"]
    table = _table(header, lines)
    return table.replace("| --- | --- | ---: |", "| --- | ---: | ---: |", 1)


def _varied(
    cells: Sequence[AnyCell], title: str, lines: Callable[[_Books], Iterable[tuple[str, str, Method]]], **books: bool
) -> str:
    """Scores of changed methods, mean over suites: `lines` gives a name, a scorer and the method at any ρ."""
    own = _Books(cells, **books)
    shown = [
        [name, scorer, *(own.score(_at(method, ratio)) for ratio in own.retentions)]
        for name, scorer, method in lines(own)
    ]
    return _table([title, "scorer", *_columns(own)], shown)


def _at(method: Method, retention: float) -> Method:
    return method if method.name == "full" else replace(method, kv_retention=retention)


def _changed(books: _Books, names: Sequence[MethodName], **changes: object) -> list[tuple[str, str, Method]]:
    found = []
    for scorer in books.scorers:
        for name in names:
            method = books.plain(name, scorer, 0.5)
            assert method is not None
            found.append((_TITLES[name], scorer, replace(method, **changes)))  # type: ignore[arg-type]
    return found


def _alphas(cells: Sequence[AnyCell]) -> str:
    def lines(books: _Books) -> list[tuple[str, str, Method]]:
        found = [
            (f"static, α {alpha:g}", scorer, method)
            for alpha in (0.0, 1.0, 2.0)
            for _, scorer, method in _changed(books, ["static"], alpha=alpha)
        ]
        return sorted(found, key=lambda line: books.scorers.index(line[1]))

    return _varied(cells, "mean of both suites, %", lines)


def _chunks(cells: Sequence[AnyCell]) -> str:
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")

    def lines(books: _Books) -> list[tuple[str, str, Method]]:
        found = [
            (f"{name}, C {chunk}", scorer, method)
            for chunk in (256, 512, 1024, 2048)
            for name, scorer, method in _changed(books, names, chunk_tokens=chunk)
        ]
        return sorted(found, key=lambda line: (books.scorers.index(line[1]), line[0].split(",")[0]))

    return _varied(cells, "mean of both suites, %", lines)


def _scopes(cells: Sequence[AnyCell]) -> str:
    names: tuple[MethodName, ...] = ("static", "dynamic", "one-shot")

    def lines(books: _Books) -> list[tuple[str, str, Method]]:
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

    def lines(books: _Books) -> list[tuple[str, str, Method]]:
        return [
            (f"static, sinks {sinks}, window {'C / 64' if window is None else window}", scorer, method)
            for sinks, window in sorted(kept, key=lambda one: (-(one[0] or 0), -1 if one[1] is None else one[1]))
            for _, scorer, method in _changed(books, ["static"], sink_tokens=sinks, window_tokens=window)
        ]

    return _varied(cells, "mean of both suites, %", lines)


def _tails(cells: Sequence[AnyCell]) -> str:
    def lines(books: _Books) -> list[tuple[str, str, Method]]:
        return [("full", _NONE, Method("full")), *_changed(books, ["uniform", "static"])]

    return _varied(cells, "mean of both suites, %", lines, aligned=False)


def _fidelity(cells: Sequence[AnyCell]) -> str:
    books = _Books(cells, ("fidelity",))
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")
    found = []
    for title, shown in (("KL from full, nats", lambda cell: plain(cell.divergence, 4)),
                         ("top-1 agreement, %", lambda cell: percent(cell.agreement))):  # fmt: skip
        lines = [
            [_TITLES[name], scorer, *(shown(own[0]) if own and isinstance(own[0], FidelityCell) else _NONE
             for own in (books.of(books.plain(name, scorer, ratio)) for ratio in books.retentions))]
            for scorer in books.scorers for name in names
        ]  # fmt: skip
        found.append(_table([title, "scorer", *_columns(books)], lines))
    return "\n\n".join(table for table in found if table)


def _locomo(cells: Sequence[AnyCell]) -> str:
    books = _Books(cells, ("locomo",))
    names: tuple[MethodName, ...] = ("uniform", "static", "dynamic")
    full = books.score(Method("full"))
    lines = [["full", _NONE, *[full] * len(books.retentions)]] + [
        [_TITLES[name], scorer, *(books.score(books.plain(name, scorer, ratio)) for ratio in books.retentions)]
        for scorer in books.scorers
        for name in names
    ]
    return _table(["score, % ± standard error", "scorer", *_columns(books)], lines)
