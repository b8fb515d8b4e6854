"""Figures of `bench.serving.compare` by series, and the series that a table shows for a case."""

from __future__ import annotations

import errno
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PEER, PLAIN, FP8 = "vllm", "tangram-0.25", "tangram-0.25-fp8"
COMPARED = (PEER, "tangram-0.5", PLAIN, "tangram-1")
Result = dict[str, Any]
Found = dict[str, Result]  # by engine
Row = Mapping[str, Any]  # a row of a table: `case`, `parts` of it, and a `figure` of them


def series(results: Path, kind: str = "serving") -> list[Found]:
    """The results in each series of a kind, by engine: `KIND_ENGINE.json`, `KIND-2_ENGINE.json`, …

    `COMPARED` engines come first. Raises `FileNotFoundError` if there are none.
    """
    names = sorted({path.name.split("_")[0] for path in results.glob(f"{kind}*_*.json")})
    if not names:
        raise FileNotFoundError(errno.ENOENT, "no results", str(results / f"{kind}_*.json"))
    return [_series(results, name) for name in names]


def _series(results: Path, name: str) -> Found:
    paths = {path.stem.split("_", 1)[1]: path for path in sorted(results.glob(f"{name}_*.json"))}
    engines = [engine for engine in dict.fromkeys((*COMPARED, *paths)) if engine in paths]
    return {engine: json.loads(paths[engine].read_text(encoding="utf-8")) for engine in engines}


def figures(result: Result | None, row: Row) -> list[float]:
    """The row's figure, or a percentile of it, for every part of the row."""
    parts = result["cases"].get(row["case"], {}) if result else {}
    measured = [part for name, part in parts.items() if name.startswith(tuple(row["parts"]))]
    if row["figure"] == "prompt_tokens_per_s":
        return [part["prompt_tokens"] / part["seconds"] for part in measured]
    name, _, percentile = row["figure"].partition(" ")
    return [part[name][percentile] if percentile else part[name] for part in measured]


def speed(values: Sequence[float], row: Row) -> float:
    """Their median, with more being better; 0 if there are none."""
    if not values:
        return 0.0
    middle = statistics.median(values)
    return middle if row["figure"].endswith("per_s") else 1.0 / middle


def find_series(row: Row, among: Sequence[Found]) -> int | None:
    """The series that shows a row: that of the peer's last day, of the most engines on that day,
    and then of the peer's best result.

    None if no series has the case. Engines are compared within one lease. (vLLM with host memory
    behind its pool is slower in some cases than without.)
    """
    having = [place for place, results in enumerate(among) if row["case"] in _cases(results)]

    def rank(place: int) -> tuple[str, int, float]:
        peer = among[place].get(PEER)
        day = peer["environment"]["date"] if peer else ""
        compared = (among[place][engine] for engine in (*COMPARED, FP8) if engine in among[place])
        engines = sum(row["case"] in result["cases"] for result in compared)
        return day, engines, speed(figures(peer, row), row)

    return max(reversed(having), key=rank, default=None)


def _cases(results: Found) -> set[str]:
    """The figures of the peer, which others are compared with; without a peer, of any engine."""
    asked = [results[PEER]] if PEER in results else results.values()
    return {case for result in asked for case in result["cases"]}


def by_series(rows: Sequence[Row], among: Sequence[Found]) -> dict[int, list[Row]]:
    """The rows that each series shows, the series of the first row first."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if (place := find_series(row, among)) is not None:
            found.setdefault(place, []).append(row)
    return found


def first_of_each(among: Sequence[Found]) -> Found:
    """The first result of every compared engine, in their order."""
    every = {name: [results[name] for results in among if name in results] for name in COMPARED}
    return {name: found[0] for name, found in every.items() if found}
