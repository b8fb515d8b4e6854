"""Keeps thin result files of `tangram eval`, for the tables of docs/accuracy-tables.md.

With `--control` it also keeps graded files of kvpress_control.py. Files of
bench/accuracy/evidence.py are kept unchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy import figures
from bench.accuracy.kvpress_file import Control
from bench.accuracy.thin import Thin
from bench.render.page import RESULTS
from tangram_lab.accuracy.results import Results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--add", action="store_true", help="keep what there is, too")
    parser.add_argument("--control", type=Path, nargs="+", help="kept, too")
    parser.add_argument("--kept", type=Path, default=RESULTS, help="folder of the thin files")
    options = parser.parse_args(arguments)
    if not (options.results or options.control):
        parser.error("there is nothing to keep: name result files, or --control")
    if options.results:
        known = figures.thin(options.kept) if options.add else None
        files = [Results.load(path) for path in options.results]
        Thin.of(files, known).save(options.kept / figures.KEPT)
    if options.control:
        graded = Control.grade(*options.control)
        before = figures.control(options.kept) if options.add else None
        (before.join(graded) if before else graded).save(options.kept / figures.CONTROL)


if __name__ == "__main__":
    main()
