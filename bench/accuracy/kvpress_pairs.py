"""Paired differences between scores of the control and of Tangram, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.accuracy.figures import Comparison, Scores
from bench.accuracy.kvpress_file import Control, GradedCell
from tangram.config import Scope
from tangram_lab.accuracy.results import AnyCell, Cell, Score

# Presses that are not Ada-KV with the scorer of their name: their title, scorer, and scope here.
_PRESSES: dict[str, tuple[str, str, Scope]] = {
    "kvzip": ("kvpress, KVzip", "kvzip", "model"),
    "expected_attention_epsilon": ("kvpress, Ada-KV, ε 0.01", "expected_attention", "layer"),
}
FULL = "full"  # the press that drops nothing


@dataclass(frozen=True)
class Press:
    """A press and Tangram's one-shot in its scope, by ρ; `less` is Tangram less the press."""

    title: str
    scorer: str
    scope: Scope
    scores: Scores
    ours: Scores
    less: Scores


@dataclass(frozen=True)
class SuiteControl:
    """The control of one suite, and Tangram at its ρ; `full` is its score with everything kept."""

    suite: str
    full: Score | None
    presses: list[Press]
    ours: Comparison


def beside(control: Control, cells: Sequence[AnyCell]) -> list[SuiteControl]:
    """Each suite of `control`, with Tangram's `cells` of the same prompts.

    Raises `ValueError` if Tangram has no cells of the control's prompts, since scores of other
    prompts cannot be compared.
    """
    found = []
    for digest in dict.fromkeys(cell.prompts_sha256 for cell in control.cells):
        theirs = [cell for cell in control.cells if cell.prompts_sha256 == digest]
        own = [cell for cell in cells if cell.setting.prompts_sha256 == digest]
        if not own:
            raise ValueError(
                f"prompts_sha256 {digest} of suite {theirs[0].suite} is in no cell of the results: "
                "export the prompts with the options of tangram eval, --align-tokens its largest "
                "chunk"
            )
        ours = Comparison(own, (theirs[0].suite,), aligned=own[0].setting.aligned)
        found.append(_suite(theirs, ours))
    return found


def _suite(theirs: Sequence[GradedCell], ours: Comparison) -> SuiteControl:
    full = [Score.of(cell.scores) for cell in theirs if cell.scorer == FULL]
    kept = [cell for cell in theirs if cell.scorer != FULL]
    retentions = sorted({cell.kv_retention for cell in kept}, reverse=True)
    ours = ours.at(*retentions)
    presses = [
        _press(name, [cell for cell in kept if cell.scorer == name], ours)
        for name in dict.fromkeys(cell.scorer for cell in kept)
    ]
    return SuiteControl(theirs[0].suite, full[0] if full else None, presses, ours)


def _press(name: str, cells: Sequence[GradedCell], ours: Comparison) -> Press:
    title, scorer, scope = _PRESSES.get(name, ("kvpress, Ada-KV", name, "layer"))
    by_retention = {cell.kv_retention: cell.scores for cell in cells}
    theirs = [by_retention.get(retention, []) for retention in ours.retentions]
    own = [_at_once(ours, scorer, scope, retention) for retention in ours.retentions]
    less = [
        [mine - its for mine, its in zip(*pair, strict=True)] if all(pair) else []
        for pair in zip(own, theirs, strict=True)
    ]
    return Press(title, scorer, scope, *(list(map(_mean, one)) for one in (theirs, own, less)))


def _at_once(ours: Comparison, scorer: str, scope: Scope, retention: float) -> list[float]:
    """One-shot's score of each sample; none if it was not asked."""
    found = ours.of(ours.method("one-shot", scorer, retention, scope=scope))
    return [one.score for cell in found if isinstance(cell, Cell) for one in cell.samples]


def _mean(scores: Sequence[float]) -> Score | None:
    return Score.of(scores) if scores else None
