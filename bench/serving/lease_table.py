"""What a lease has measured: `python -m bench.serving.lease_table FOLDER`.

Medians over the runs of a case. Behind the output tokens/s over HTTP stands how many times as many
they are as inside the process, where the same engine has measured the case in both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
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
        for engine in dict.fromkeys((*COMPARED, *inside, *served)):
            within = read_medians(inside, engine, case)
            over = read_medians(served, engine, case)
            for way, medians in (("inside", within), ("HTTP", over)):
                if not medians:
                    continue
                cells = {name: f"{medians[name]:,.4g}" for name in medians}
                if way == "HTTP" and (before := within.get("tokens/s")):
                    cells["tokens/s"] += f" · {over['tokens/s'] / before:.2f} ×"
                yield case, engine, way, [cells.get(name, "") for name in COLUMNS]


def list_speeds(ways: Mapping[str, Found]) -> Iterator[tuple[str, str, str, str]]:
    """Of each engine's trace: the way that it was asked, the fastest speed that held, its times to
    a first token, and what was too fast.
    """
    for way, found in ways.items():
        for engine, result in found.items():
            parts = dict(result["cases"]["trace"])
            too_fast = parts.pop("given up", "")
            speed = max(parts, key=lambda part: float(part.split()[1]), default="none")
            waits = parts[speed]["ttft_s"] if parts else {}
            shown = ", ".join(f"{name} {wait:.2f}" for name, wait in waits.items())
            yield engine, way, f"{speed} ({shown})" if shown else speed, too_fast


def _tabulate_speeds(folder: Path) -> Table:
    ways = {"inside": _read(folder, "trace"), "HTTP": _read(folder, "http-trace")}
    table = Table("engine", "way", "the trace's fastest speed, TTFT in s", "too fast")
    for row in list_speeds(ways):
        table.add_row(*row)
    return table


def _read(folder: Path, kind: str) -> Found:
    try:
        return series(folder, kind)[0]
    except FileNotFoundError:
        return {}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    table = Table("case", "engine", "way", *(name.rstrip() for name in COLUMNS))
    for case, engine, way, cells in compare_ways(_read(folder, INSIDE), _read(folder, SERVED)):
        table.add_row(case, engine, way, *cells)
    for found in (table, _tabulate_speeds(folder)):
        if found.rows:
            Console(width=250).print(found)


if __name__ == "__main__":
    main()
