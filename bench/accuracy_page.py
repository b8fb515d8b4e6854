"""Writes the measured tables of docs/accuracy.md from a result file of `tangram eval`.

    python -m bench.accuracy_page RESULTS.json [--page docs/accuracy.md]

They stand between `<!-- eval -->` and `<!-- end eval -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.kernels.page import replaced
from tangram.evaluate.report import report
from tangram.evaluate.results import Results

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    found = Results.load(options.results)
    tables = f"\n{report(found.cells)}\n`{found.command}`\n\n"
    options.page.write_text(replaced(options.page.read_text(), "eval", tables))


if __name__ == "__main__":
    main()
