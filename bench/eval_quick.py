"""Does compression still cost what it did? A few minutes of `tangram eval` on the embedded model, with bounds.

    python -m bench.eval_quick        (make eval-quick)

Prints the tables, and exits with 1 where a number is outside its bounds in eval_quick_bounds.json, or where budgets of
a profile are no better than equal ones. Every run measures anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tangram.cli.evaluate import Bar
from tangram.config import EngineConfig
from tangram.evaluate.compare import compare
from tangram.evaluate.methods import Grid
from tangram.evaluate.passages import RealText
from tangram.evaluate.prompts import Questions
from tangram.evaluate.report import report
from tangram.evaluate.results import AnyCell, FidelityCell

BOUNDS = Path(__file__).with_name("eval_quick_bounds.json")
GRID = Grid(["full", "uniform", "static"], ["keydiff"], [0.5])
# The tasks that a model of 135 M parameters answers at all, three chunks long.
ASKED = (
    Questions("ruler", ("niah_single_3", "niah_multikey_1"), samples=12, context_tokens=1536, max_questions=3),
    RealText(samples=8, context_tokens=1536),
)

Bounds = Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]  # by suite, method and name: from, to


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, Bar() as bar:
        cells = compare(
            EngineConfig(), GRID, ASKED, align=True, calibration_samples=50, output=Path(folder) / "results.json",
            command="python -m bench.eval_quick", watch=bar,
        )  # fmt: skip
    print(report(cells))
    broken = [*outside(cells, json.loads(BOUNDS.read_text())), *overtaken(cells)]
    print("\n".join(broken) or "every number is within its bounds", file=sys.stderr)
    return 1 if broken else 0


def outside(cells: Sequence[AnyCell], bounds: Bounds) -> list[str]:
    """A line for each number that is out of bounds; `KeyError` for a cell that has none."""
    return [
        f"{cell.setting.suite}, {cell.method.title}: {name} is {getattr(cell, name).mean:.3f}, it must lie in "
        f"[{least}, {most}] ({BOUNDS.name})"
        for cell in cells
        for name, (least, most) in bounds[cell.setting.suite][cell.method.name].items()
        if not least <= getattr(cell, name).mean <= most
    ]


def overtaken(cells: Sequence[AnyCell]) -> list[str]:
    """A line for each suite in which equal budgets are no worse than those of a profile."""
    lost = {
        (cell.setting.suite, cell.method.name): cell.divergence.mean
        if isinstance(cell, FidelityCell)
        else -cell.score.mean
        for cell in cells
    }
    return [
        f"{suite}: budgets of a profile are no better than equal ones (divergence or −score {loss:.3f}, "
        f"{lost[suite, 'uniform']:.3f})"
        for (suite, method), loss in lost.items()
        if method == "static" and loss >= lost[suite, "uniform"]
    ]


if __name__ == "__main__":
    sys.exit(main())
