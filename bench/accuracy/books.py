"""Cells found by method, the means over suites that are made of them, and their tables in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from tangram.compress.profile import ALPHA, SINK_TOKENS, default_scope
from tangram.config import EngineConfig
from tangram.lab.accuracy.methods import WITH_PROFILE, Method, MethodName
from tangram.lab.accuracy.report import difference, percent
from tangram.lab.accuracy.results import AnyCell, Cell, Score, Setting

AVERAGED = ("ruler", "multiturn")
NONE = "–"


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


class Books:
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
        method = Method(name, retention, scorer, chunk, None if name == "uniform" else default_scope(scorer))
        if name == "static":
            method = replace(method, alpha=ALPHA)
        return replace(method, sink_tokens=SINK_TOKENS) if name in WITH_PROFILE else method

    def score(self, method: Method | None) -> str:
        return worded(self.of(method))

    def less(self, method: Method | None, other: Method | None) -> str:
        pairs = list(zip(self.of(method), self.of(other), strict=False))
        return percent(mean_difference(pairs), signed=True) if pairs else NONE


def worded(found: Sequence[AnyCell]) -> str:
    return percent(mean_score([cell for cell in found if isinstance(cell, Cell)])) if found else NONE


def table(header: Sequence[str], lines: Iterable[Sequence[str]], labels: int = 2) -> str:
    """The first `labels` columns name a line; lines without a figure go, and so does a table without lines."""
    kept = [line for line in lines if any(cell != NONE for cell in line[labels:])]
    if not kept:
        return ""
    rule = ["---"] * labels + ["---:"] * (len(header) - labels)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *kept])


def columns(books: Books) -> list[str]:
    return [f"ρ {retention:g}" for retention in books.retentions]
