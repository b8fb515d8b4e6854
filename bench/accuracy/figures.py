"""Cells by method, and the means and paired differences of suites that the tables show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.accuracy.kvpress_file import Control
from bench.accuracy.thin import Thin
from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.compress.scorers import default_scope
from tangram.config import EngineConfig
from tangram_lab.accuracy.methods import WITH_PROFILE, Method, MethodName
from tangram_lab.accuracy.results import AnyCell, Cell, Score, Setting
from tangram_lab.accuracy.score_report import difference

Scores = list[Score | None]  # None where one is missing
AVERAGED = ("ruler", "multiturn")
# Tasks with several needles, run by themselves: in a few repeated lines, and in prose.
NEEDLES = {
    "multiturn": ("noise", {"needles"}),
    "ruler": ("prose", {"niah_multikey_1", "niah_multivalue", "niah_multiquery"}),
}
# The result files of one folder.
KEPT, CONTROL, EVIDENCE = "accuracy.json", "accuracy_kvpress.json", "accuracy_evidence.json"


def thin(results: Path) -> Thin:
    """All results of `tangram eval`. Raises `FileNotFoundError` if there are none."""
    return Thin.load(results / KEPT)


def whole(results: Path) -> Sequence[AnyCell]:
    """The cells of `thin`. Several pages show them, so they are made once."""
    return _make_cells((results / KEPT).read_text(encoding="utf-8"))


@cache
def _make_cells(text: str) -> Sequence[AnyCell]:
    return Thin.model_validate_json(text).whole()


def control(results: Path) -> Control | None:
    """The kept control, if there is one."""
    path = results / CONTROL
    return Control.load(path) if path.exists() else None


def whole_suites(cells: Iterable[AnyCell]) -> list[AnyCell]:
    """The cells with all tasks of a suite."""
    return [cell for cell in cells if not _of_needles(cell)]


def needles_alone(cells: Iterable[AnyCell]) -> list[AnyCell]:
    """The cells with several needles only."""
    return [cell for cell in cells if _of_needles(cell)]


def _of_needles(cell: AnyCell) -> bool:
    suite = cell.setting.suite
    return isinstance(cell, Cell) and suite in NEEDLES and set(cell.by_task) == NEEDLES[suite][1]


def mean_score(cells: Sequence[Cell]) -> Score:
    """The mean over suites with equal weights."""
    return _average([cell.score for cell in cells])


def mean_difference(pairs: Sequence[tuple[AnyCell, AnyCell]]) -> Score:
    """The mean over suites of `pairs`, one pair a suite: the first less the second by samples."""
    return _average([difference(*pair) for pair in pairs])


def _average(scores: Sequence[Score]) -> Score:
    errors = [score.stderr for score in scores if score.stderr is not None]
    known = len(errors) == len(scores)
    return Score(
        mean=fmean(score.mean for score in scores),
        stderr=math.sqrt(sum(error * error for error in errors)) / len(scores) if known else None,
        samples=sum(one.samples for one in scores),
    )


class Comparison:
    """Cells of one alignment and some suites, by method; a figure needs all of its suites."""

    def __init__(
        self, cells: Iterable[AnyCell], suites: Sequence[str] = AVERAGED, *, aligned: bool = True
    ) -> None:
        both = [cell for cell in cells if cell.setting.aligned == aligned]
        kept = [cell for cell in both if cell.setting.suite in suites]
        # Most were run together with one-shot; others have different prompts.
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

    @property
    def context_tokens(self) -> int:
        """The length of contexts, which is one-shot's chunk."""
        return self.settings[0].context_tokens if self.settings else EngineConfig.chunk_tokens

    def method(
        self, name: MethodName, scorer: str = "", retention: float = 1.0, **changes: Any
    ) -> Method:
        """The method with defaults except `changes`."""
        if name == "full":
            return Method("full")
        chunk = self.context_tokens if name == "one-shot" else EngineConfig.chunk_tokens
        scope = None if name == "uniform" else default_scope(scorer)
        method = Method(name, retention, scorer, chunk, scope)
        if name == "static":
            method = replace(method, alpha=ALPHA)
        if name in WITH_PROFILE:
            method = replace(method, sink_tokens=SINK_TOKENS)
        return replace(method, **changes)

    def of(self, method: Method) -> list[AnyCell]:
        """One cell a suite; none if one is missing."""
        own = self._found.get(method, {})
        found = [own[setting] for setting in self.settings if setting in own]
        return found if len(found) == len(self.settings) else []

    def score(self, method: Method) -> Score | None:
        """The mean over suites; None if one is missing."""
        found = self._answering(method)
        return mean_score(found) if found else None

    def less(self, method: Method, other: Method) -> Score | None:
        """The first less the second, mean over suites; None if one is missing."""
        pairs = list(zip(self.of(method), self.of(other), strict=False))
        return mean_difference(pairs) if pairs else None

    def at(self, *retentions: float) -> Comparison:
        """The same cells, at these ρ only."""
        narrowed = copy(self)
        narrowed.retentions = list(retentions)
        return narrowed

    def scores(self, name: MethodName, scorer: str = "", **changes: Any) -> Scores:
        """At every ρ."""
        return [self.score(method) for method in self._methods(name, scorer, **changes)]

    def differences(
        self, name: MethodName, other: MethodName, scorer: str, **changes: Any
    ) -> Scores:
        """At every ρ the first, with `changes`, less the second."""
        firsts = self._methods(name, scorer, **changes)
        pairs = zip(firsts, self._methods(other, scorer), strict=True)
        return [self.less(*pair) for pair in pairs]

    def figures(self, name: MethodName, scorer: str, figure: str) -> Scores:
        """At every ρ a figure of the first suite."""
        found = [self.of(method) for method in self._methods(name, scorer)]
        return [getattr(own[0], figure) if own else None for own in found]

    def full_and_static(self, retention: float) -> list[Cell]:
        """From the first suite: full and every scorer's static budgets; empty without full."""
        methods = [self.method("full")]
        methods += [self.method("static", scorer, retention) for scorer in self.scorers]
        found = [self._answering(method)[:1] for method in methods]
        return [cell for own in found for cell in own] if found[0] else []

    def _methods(self, name: MethodName, scorer: str, **changes: Any) -> list[Method]:
        return [self.method(name, scorer, one, **changes) for one in self.retentions]

    def _answering(self, method: Method) -> list[Cell]:
        return [cell for cell in self.of(method) if isinstance(cell, Cell)]
