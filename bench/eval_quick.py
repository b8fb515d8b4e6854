"""Checks the cost of compression by a short `tangram eval` on the embedded model, with bounds.

Prints the tables. Exits with 1 if a number is outside its bounds in eval_quick_bounds.json, or if
the budgets of a profile are no better than equal ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tangram.config import EngineConfig
from tangram_lab.accuracy.evaluation import compare
from tangram_lab.accuracy.methods import Grid, Method
from tangram_lab.accuracy.quick import NEEDLES, TEXT
from tangram_lab.accuracy.results import AnyCell, FidelityCell
from tangram_lab.accuracy.score_report import report
from tangram_lab.cli.evaluate import Bar

BOUNDS = Path(__file__).with_name("eval_quick_bounds.json")
# Fewer than `tangram eval --quick` asks: it runs with every submission, on slow machines, too.
_NEEDLES, _TEXT = replace(NEEDLES, samples=4), replace(TEXT, samples=3)
_CALIBRATION_SAMPLES = 4
# The default scorer here with the budgets that ship; and the scorer of other models, calibrated
# anew.
ASKED = (
    (Grid(["full", "uniform", "static"], ["fastkvzip"], [0.5]), (_NEEDLES, _TEXT), None),
    (Grid(["uniform", "static"], ["keydiff"], [0.5]), (_NEEDLES,), _CALIBRATION_SAMPLES),
)

# By suite, method and number: the minimum, the measurement at the time of writing, the maximum.
Bounds = Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]]


def main() -> int:
    cells = list[AnyCell]()
    for grid, asked, samples in ASKED:
        with tempfile.TemporaryDirectory() as folder, Bar() as bar:
            cells += compare(
                EngineConfig(dtype="float32"),  # the bounds are of it
                grid,
                asked,
                align=True,
                calibration_samples=samples,
                output=Path(folder) / "results.json",
                command="python -m bench.eval_quick",
                watch=bar,
            )
    print(report(cells))
    broken = [*outside(cells, json.loads(BOUNDS.read_text())), *overtaken(cells)]
    print("\n".join(broken) or "every number is within its bounds", file=sys.stderr)
    return 1 if broken else 0


def name_method(method: Method) -> str:
    """A method's name in the file of bounds."""
    return method.name if method.scorer is None else f"{method.name}, {method.scorer}"


def numbers(cell: AnyCell) -> dict[str, float]:
    """The figures of a cell in the report, without differences and constants, by name."""
    if isinstance(cell, FidelityCell):
        found = {"perplexity": cell.perplexity.mean}
        compressed = {"divergence": cell.divergence.mean, "agreement": cell.agreement.mean}
        return found if cell.method.name == "full" else found | compressed
    held = {} if cell.footprint is None else {"footprint": cell.footprint}
    return {
        "score": cell.score.mean,
        **{task: score.mean for task, score in cell.by_task.items()},
        **held,
    }


def outside(cells: Sequence[AnyCell], bounds: Bounds) -> list[str]:
    """A line for each number out of bounds; `KeyError` for a number without bounds."""
    found = []
    for cell in cells:
        for name, value in numbers(cell).items():
            least, seen, most = bounds[cell.setting.suite][name_method(cell.method)][name]
            if not least <= value <= most:
                found.append(
                    f"{cell.setting.suite}, {cell.method.title}: {name} is {value:.3f}, it must "
                    f"lie in [{least}, {most}] and was {seen} ({BOUNDS.name})"
                )
    return found


def overtaken(cells: Sequence[AnyCell]) -> list[str]:
    """A line for each suite and scorer with which equal budgets are as good as a profile's."""
    lost = {
        (cell.setting.suite, cell.method.name, cell.method.scorer): cell.divergence.mean
        if isinstance(cell, FidelityCell)
        else -cell.score.mean
        for cell in cells
    }
    return [
        f"{suite}, {scorer}: budgets of a profile are no better than equal ones (divergence or "
        f"−score {loss:.3f}, {lost[suite, 'uniform', scorer]:.3f})"
        for (suite, method, scorer), loss in lost.items()
        if method == "static" and loss >= lost[suite, "uniform", scorer]
    ]


if __name__ == "__main__":
    sys.exit(main())
