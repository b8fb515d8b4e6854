"""Does compression still cost what it did? A few minutes of `tangram eval` on the embedded model, with bounds.

    python -m bench.eval_quick        (make eval-quick)

Prints the tables, and exits with 1 where a number is outside its bounds in eval_quick_bounds.json, or where budgets of
one's own diverge more from the full cache than equal ones do. Every run measures anew.
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
# The tasks that a model of 135 M parameters answers at all, two chunks long.
ASKED = (
    Questions("ruler", ("niah_single_3", "niah_multikey_1"), samples=6, context_tokens=1024, max_questions=3),
    RealText(samples=4, context_tokens=1024),
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
    """A line if equal budgets are nearer to the full cache than those of a profile."""
    found = {cell.method.name: cell.divergence.mean for cell in cells if isinstance(cell, FidelityCell)}
    if found["static"] < found["uniform"]:
        return []
    return [f"fidelity: static diverges by {found['static']:.3f} nats, uniform by {found['uniform']:.3f}: no less"]


if __name__ == "__main__":
    sys.exit(main())
