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
from tangram.calibrate.report import agreement_rows, budget_name, matrix_rows, samples_rows, table

PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"
SCORERS = ("keydiff", "snapkv")  # the first is looked at closely
CLOSELY = "0.5"


def found(results: Path) -> dict[str, dict[str, Any]]:
    """The reports, by scorer."""
    paths = {name: results / f"calibration_{name}.json" for name in SCORERS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def written(reports: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The tables in Markdown, by their name on the page."""
    close = reports[SCORERS[0]]["retentions"][CLOSELY]
    return {
        "overflow": _overflow(reports) + "\n",
        "measured": "\n".join(_how(report) for report in reports.values()) + "\n",
        "samples": table(samples_rows(close["samples_needed"])) + "\n",
        "agreement": _agreement(reports) + "\n",
        "kinds": table(matrix_rows(close["kind_correlations"], "{:.2f}".format)) + "\n",
        **{
            f"transfer {alpha}": table(matrix_rows(losses, "{:.1%}".format)) + "\n"
            for alpha, losses in close["transfer"].items()
        },
    }


def _columns(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each scorer and ρ, by title."""
    return {
        f"{name}, ρ {retention}": figures
        for name, report in reports.items()
        for retention, figures in report["retentions"].items()
    }


def _overflow(reports: dict[str, dict[str, Any]]) -> str:
    """A row a way to make budgets: what is lost, over samples, and how many wishes exceed."""
    columns = _columns(reports)
    ways = next(iter(columns.values()))["overflow"]
    rows = [["budgets", *columns]]
    for way in ways:
        cells = [figures["overflow"][way] for figures in columns.values()]
        rows.append([budget_name(way), *(_cell(cell, reserved=way == "unscaled") for cell in cells)])
    return table(rows)


def _cell(figures: dict[str, float], *, reserved: bool) -> str:
    text = f"{figures['lost']:.1%} ({100 * figures['lost_p5']:.1f}–{100 * figures['lost_p95']:.1f}) · "
    return text + f"{figures['exceeded']:.0%}" + (f" · reserves {figures['footprint']:.3f}" if reserved else "")


def _agreement(reports: dict[str, dict[str, Any]]) -> str:
    columns = {title: agreement_rows(figures["agreement"]) for title, figures in _columns(reports).items()}
    names = [row[0] for row in next(iter(columns.values()))]
    cells = [[f"{row[1]} ({row[2]})" for row in rows[1:]] for rows in columns.values()]
    return table([[names[0], *columns], *([name, *row] for name, *row in zip(names[1:], *cells, strict=True))])


def _how(report: dict[str, Any]) -> str:
    where = report["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers") if name in where)
    return (
        f"- `{report['command']}`, commit {where['commit']}, {where['date']}, {where['cpu'].strip()}, "
        f"{where['threads']} thread, {versions}; {report['samples']} samples of {len(report['kinds'])} kinds, "
        f"{report['chunks']} chunks."
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
