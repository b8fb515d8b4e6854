"""Writes the measured tables of docs/accuracy.md from result files of `tangram eval`, which it keeps thin.

    python -m bench.accuracy.page FOLDER/*.json [--add] [--control CONTROL.json …]
    python -m bench.accuracy.page                       # once more, from bench/results/accuracy.json

They stand between `<!-- eval -->` and `<!-- end eval -->`. With `--control`, files of kvpress_control.py, a table of
its scores beside ours follows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy.kvpress_table import Control, control_tables
from bench.accuracy.tables import plainly, tables
from bench.accuracy.thin import Thin
from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from tangram.evaluate.report import where
from tangram.evaluate.results import Results

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
KEPT, CONTROL = RESULTS / "accuracy.json", "accuracy_kvpress.json"  # the control is kept beside


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--add", action="store_true", help="keep what the thin file has, too")
    parser.add_argument("--control", type=Path, nargs="+", help="kept, too")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--kept", type=Path, default=KEPT, help="the thin file; written if there are results")
    options = parser.parse_args(arguments)
    if options.results:
        kept = Thin.load(options.kept) if options.add else None
        Thin.of([Results.load(path) for path in options.results], kept).save(options.kept)
    if options.control:
        Control.graded(*options.control).save(options.kept.with_name(CONTROL))
    options.page.write_text(
        replaced(options.page.read_text(), "eval", written(Thin.load(options.kept), control(options.kept)))
    )


def control(kept: Path = KEPT) -> Control | None:
    """The control that is kept beside the thin file `kept`, if there is one."""
    path = kept.with_name(CONTROL)
    return Control.load(path) if path.exists() else None


def written(thin: Thin, beside: Control | None) -> str:
    """What stands on the page."""
    cells = thin.whole()
    others = [] if beside is None else [control_tables(beside, plainly(cells))]
    asked = f"Asked by {len(thin.commands)} commands of `tangram eval`, which `bench/results/{KEPT.name}` names.\n"
    return "\n" + "\n".join([tables(cells), *others, where(cells), asked])


if __name__ == "__main__":
    main()
