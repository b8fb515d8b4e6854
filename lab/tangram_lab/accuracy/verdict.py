"""The cost of compression in words, at the end of `tangram eval`."""

from __future__ import annotations

from collections.abc import Sequence

from tangram_lab.accuracy.results import AnyCell, Cell, FidelityCell, Score
from tangram_lab.accuracy.score_report import difference, label


def verdict(cells: Sequence[AnyCell]) -> list[str]:
    """A sentence for each suite and static method that was measured beside the full cache.

    A cost is a paired difference over the samples: the score with full KV less the other, ±
    standard error.
    """
    found = []
    methods = [cell.method for cell in cells]
    for full in (cell for cell in cells if cell.method.name == "full"):
        for cell in cells:
            if cell.method.name == "static" and cell.setting == full.setting:
                kept = (
                    f"ρ {cell.method.kv_retention:g} ({label(cell.method, methods)}, "
                    f"{cell.method.scorer})"
                )
                found.append(f"{kept} {_describe_difference(full, cell)}")
    return found


def _describe_difference(full: AnyCell, cell: AnyCell) -> str:
    if isinstance(cell, FidelityCell) and isinstance(full, FidelityCell):
        return _expectation(full, cell)
    if not isinstance(cell, Cell) or not isinstance(full, Cell):
        raise TypeError(f"cells of kinds {full.kind} and {cell.kind} have no difference")
    suite, contexts = full.setting.suite, full.score.samples
    if full.score.mean == 0.0:
        return (
            f"cannot be judged by {suite}: even with everything kept the model answers none of it."
        )
    cost = difference(full, cell)
    held = "" if cell.footprint is None else f", for {100 * cell.footprint:.0f} % of the KV bytes"
    return (
        f"costs {_points(cost)} points on {suite}: {100 * cell.score.mean:.1f} % instead of "
        f"{100 * full.score.mean:.1f} %{held}. {_weight(cost, contexts)}"
    )


def _expectation(full: FidelityCell, cell: FidelityCell) -> str:
    return (
        f"leaves the likeliest next token of real text the same at {_points(cell.agreement)} % of "
        f"places, and moves perplexity from {full.perplexity.mean:.2f} to "
        f"{cell.perplexity.mean:.2f}."
    )


def _points(score: Score) -> str:
    error = "" if score.stderr is None else f" ± {100 * score.stderr:.1f}"
    return f"{100 * score.mean + 0.0:.1f}{error}"


def _weight(cost: Score, contexts: int) -> str:
    """The conclusion that the error allows."""
    if cost.stderr is None:
        return "One context says little: ask more."
    if abs(cost.mean) <= 2 * cost.stderr:
        return f"That is within chance for {contexts} contexts: more samples reduce the error."
    return f"That is more than chance for {contexts} contexts."
