"""What a lease has measured: `python -m bench.serving.lease_table FOLDER`.

Medians over the runs of a case. Behind the output tokens/s over HTTP stands how many times as many
they are as inside the process, where the same engine has measured the case in both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.serving.series import COMPARED, Found, series

INSIDE, SERVED = "serving", "served"
UNCOUNTED = ("turn 1", "histories")  # they fill the cache
COLUMNS = {
    "s": "seconds",
    "requests/s": "requests_per_s",
    "tokens/s": "output_tokens_per_s",
    "TTFT p50, s": "ttft_s p50",
    "p99": "ttft_s p99",
    "TPOT p50, ms": "tpot_ms p50",
    "p99 ": "tpot_ms p99",
    "between p50, ms": "between_tokens_ms p50",
    "p99  ": "between_tokens_ms p99",
    "µs a token, API": "api_us_a_token",
    "CPU s, engine": "cpu_s engine",
    "busiest client": "busiest_client",
}


def read_medians(found: Found, engine: str, case: str) -> dict[str, float]:
    """By column, what was measured of a case; nothing if it was not run."""
    parts = found[engine]["cases"].get(case, {}) if engine in found else {}
    runs = [
        part for name, part in parts.items() if name not in UNCOUNTED and isinstance(part, dict)
    ]
    measured = {
        column: [value for run in runs if (value := _find(run, figure)) is not None]
        for column, figure in COLUMNS.items()
    }
    return {column: median(values) for column, values in measured.items() if values}


def _find(part: Any, figure: str) -> float | None:
    for key in figure.split():
        if key not in part:
            return None
        part = part[key]
    return float(part)


def compare_ways(inside: Found, served: Found) -> Iterator[tuple[str, str, str, list[str]]]:
    """The rows of the table: a case, an engine, the way that it was asked, and cells."""
    cases = dict.fromkeys(
        case for found in (inside, served) for one in found.values() for case in one["cases"]
    )
    for case in cases:
        for engine in COMPARED:
            within = read_medians(inside, engine, case)
            over = read_medians(served, engine, case)
            for way, medians in (("inside", within), ("HTTP", over)):
                if not medians:
                    continue
                cells = {name: f"{medians[name]:,.4g}" for name in medians}
                if way == "HTTP" and (before := within.get("tokens/s")):
                    cells["tokens/s"] += f" · {over['tokens/s'] / before:.2f} ×"
                yield case, engine, way, [cells.get(name, "") for name in COLUMNS]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    both = []
    for kind in (INSIDE, SERVED):
        try:
            both.append(series(folder, kind)[0])
        except FileNotFoundError:
            both.append({})
    table = Table("case", "engine", "way", *(name.rstrip() for name in COLUMNS))
    for case, engine, way, cells in compare_ways(*both):
        table.add_row(case, engine, way, *cells)
    Console(width=250).print(table)


if __name__ == "__main__":
    main()
