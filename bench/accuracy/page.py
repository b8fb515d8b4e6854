"""Writes the measured tables of docs/accuracy.md from result files of `tangram eval`, which it keeps thin.

    python -m bench.accuracy.page FOLDER/*.json [--add] [--control CONTROL.json …]
    python -m bench.accuracy.page                       # once more, from bench/results/accuracy.json

They stand between `<!-- eval -->` and `<!-- end eval -->`. With `--control`, files of kvpress_control.py, a table of
its scores beside ours follows. The last one is of bench/results/accuracy_evidence.json, which
bench/accuracy/evidence.py writes, if it is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy.evidence_table import Evidence, evidence_table
from bench.accuracy.kvpress_table import Control, control_tables
from bench.accuracy.needles import whole_suites
from bench.accuracy.tables import tables
from bench.accuracy.thin import Thin
from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from tangram.lab.accuracy.report import where
from tangram.lab.accuracy.results import Results

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
KEPT, CONTROL = RESULTS / "accuracy.json", "accuracy_kvpress.json"  # the control is kept beside
EVIDENCE = "accuracy_evidence.json"  # and so is recall of evidence


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--add", action="store_true", help="keep what the thin file and the control have, too")
    parser.add_argument("--control", type=Path, nargs="+", help="kept, too")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--kept", type=Path, default=KEPT, help="the thin file; written if there are results")
    options = parser.parse_args(arguments)
    if options.results:
        kept = Thin.load(options.kept) if options.add else None
        Thin.of([Results.load(path) for path in options.results], kept).save(options.kept)
    if options.control:
        graded, known = Control.graded(*options.control), control(options.kept) if options.add else None
        (known.joined(graded) if known else graded).save(options.kept.with_name(CONTROL))
    table = written(Thin.load(options.kept), control(options.kept), evidence(options.kept))
    options.page.write_text(replaced(options.page.read_text(), "eval", table))


def control(kept: Path = KEPT) -> Control | None:
    """The control that is kept beside the thin file `kept`, if there is one."""
    path = kept.with_name(CONTROL)
    return Control.load(path) if path.exists() else None


def evidence(kept: Path = KEPT) -> Evidence | None:
    """Recall of evidence that is kept beside the thin file `kept`, if it was measured."""
    path = kept.with_name(EVIDENCE)
    return Evidence.load(path) if path.exists() else None


def written(thin: Thin, beside: Control | None, recalled: Evidence | None) -> str:
    """What stands on the page."""
    cells = thin.whole()
    others = [] if beside is None else [control_tables(beside, whole_suites(cells))]
    asked = f"Asked by {len(thin.commands)} commands of `tangram eval`, which `bench/results/{KEPT.name}` names.\n"
    recalls = [] if recalled is None else [evidence_table(recalled)]
    return "\n" + "\n".join([tables(cells), *others, where(cells), asked, *recalls])


if __name__ == "__main__":
    main()
