"""Writes the measured tables of docs/accuracy.md from a result file of `tangram eval`.

    python -m bench.accuracy_page RESULTS.json [--control CONTROL.json] [--page docs/accuracy.md]

They stand between `<!-- eval -->` and `<!-- end eval -->`. With `--control`, the file of bench/kvpress_control.py, a
table of its scores beside ours follows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.kernels.page import replaced
from bench.kvpress_table import Control, control_tables
from tangram.evaluate.report import report
from tangram.evaluate.results import Results

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--control", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    found = Results.load(options.results)
    tables = f"\n{report(found.cells)}\n`{found.command}`\n\n"
    if options.control is not None:
        tables += f"{control_tables(Control.load(options.control), found.cells)}\n"
    options.page.write_text(replaced(options.page.read_text(), "eval", tables))


if __name__ == "__main__":
    main()
