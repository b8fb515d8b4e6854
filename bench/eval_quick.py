"""Does compression still cost what it did? A few minutes of `tangram eval` on the embedded model, with floors.

    python -m bench.eval_quick        (make eval-quick)

Prints the tables, and exits with 1 where a score, or for fidelity the agreement with the full cache, is below its floor
in eval_quick_floors.json. Every run measures anew.
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

FLOORS = Path(__file__).with_name("eval_quick_floors.json")
GRID = Grid(["full", "static"], ["keydiff"], [0.5])
# The tasks that a model of 135 M parameters answers at all, two chunks long.
ASKED = (
    Questions("ruler", ("niah_single_3", "niah_multikey_1"), samples=6, context_tokens=1024, max_questions=3),
    RealText(samples=4, context_tokens=1024),
)

Floors = Mapping[str, Mapping[str, float]]  # by suite and method


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, Bar() as bar:
        cells = compare(
            EngineConfig(), GRID, ASKED, align=True, calibration_samples=50, output=Path(folder) / "results.json",
            command="python -m bench.eval_quick", watch=bar,
        )  # fmt: skip
    print(report(cells))
    broken = below(cells, json.loads(FLOORS.read_text()))
    print("\n".join(broken) or "every score is at its floor or above it", file=sys.stderr)
    return 1 if broken else 0


def below(cells: Sequence[AnyCell], floors: Floors) -> list[str]:
    """A line for each cell whose score is below its floor; `KeyError` for one that has none."""
    found = [(cell, floors[cell.setting.suite][cell.method.name]) for cell in cells]
    return [
        f"{cell.setting.suite}, {cell.method.title}: {_mean(cell):.3f} is below its floor of {floor} in {FLOORS}"
        for cell, floor in found
        if _mean(cell) < floor
    ]


def _mean(cell: AnyCell) -> float:
    return cell.agreement.mean if isinstance(cell, FidelityCell) else cell.score.mean


if __name__ == "__main__":
    sys.exit(main())
