"""Writes the measured tables of docs/calibration.md from the reports of `tangram calibrate --report`.

python -m bench.calibration_page [--results bench/results] [--page docs/calibration.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from tangram.lab.accuracy.report import machine
from tangram.lab.calibration.report import agreement_rows, budget_name, matrix_rows, samples_rows, table

PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"
CLOSELY = "keydiff", "0.5"  # the scorer and ρ that are looked at closely
# tova and streaming_llm score all heads of a layer alike, and have nothing to show.
SCORERS = ("keydiff", "fastkvzip", "kvzip", "expected_attention", "snapkv")
PICTURED = ("keydiff", "fastkvzip", "snapkv")

Report = dict[str, Any]


def found(results: Path) -> dict[str, Report]:
    """The reports, by scorer."""
    return {name: json.loads((results / f"calibration_{name}.json").read_text()) for name in SCORERS}


def written(reports: dict[str, Report]) -> dict[str, str]:
    """The tables in Markdown, by their name on the page."""
    scorer, retention = CLOSELY
    close = reports[scorer]["retentions"][retention]
    return {
        **{f"overflow {rho}": _overflow(reports, rho) + "\n" for rho in reports[scorer]["retentions"]},
        "measured": "\n".join(_how(report) for report in reports.values()) + "\n",
        "samples": table(samples_rows(close["samples_needed"])) + "\n",
        "agreement": _agreement(reports) + "\n",
        "kinds": table(matrix_rows(close["kind_correlations"], "{:.2f}".format)) + "\n",
        **{
            f"transfer {alpha}": table(matrix_rows(losses, "{:.1%}".format)) + "\n"
            for alpha, losses in close["transfer"].items()
        },
    }


def _overflow(reports: dict[str, Report], retention: str) -> str:
    """A row a way to make budgets: what is lost, over samples, and how many wishes exceed."""
    columns = {name: report["retentions"][retention]["overflow"] for name, report in reports.items()}
    rows = [["budgets", *columns]]
    for way in columns[CLOSELY[0]]:
        cells = [_cell(found[way], reserved=way == "unscaled") for found in columns.values()]
        rows.append([budget_name(way), *cells])
    return table(rows)


def _cell(figures: dict[str, float], *, reserved: bool) -> str:
    text = f"{figures['lost']:.1%} ({100 * figures['lost_p5']:.1f}–{100 * figures['lost_p95']:.1f}) · "
    return text + f"{figures['exceeded']:.0%}" + (f" · reserves {figures['footprint']:.3f}" if reserved else "")


def _agreement(reports: dict[str, Report]) -> str:
    """A row a scorer, a column a sort of pairs at a ρ."""
    lines = list[list[str]]()
    for name, report in reports.items():
        pairs = {
            f"{sort}, ρ {retention}": f"{mean} ({least})"
            for retention, figures in report["retentions"].items()
            for sort, mean, least in agreement_rows(figures["agreement"])[1:]
        }
        lines = lines or [["scorer", *pairs]]
        lines.append([name, *pairs.values()])
    return table(lines)


def _how(report: Report) -> str:
    return (
        f"- `{report['command']}`: {machine(report['environment'])}; {report['samples']} samples of "
        f"{len(report['kinds'])} kinds, {report['chunks']} chunks, α {report['alpha']:g}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text = options.page.read_text()
    for name, content in written(found(options.results)).items():
        text = replaced(text, name, content)
    options.page.write_text(text)


if __name__ == "__main__":
    main()
