"""Filters of the templates: numbers in words, rows in groups, a table of rows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from jinja2 import Undefined

from tangram_lab.accuracy import score_report
from tangram_lab.accuracy.results import Score

NONE = "–"


def table(text: str, labels: int = 1, *, once: bool = False) -> str:
    """Markdown of rows `| a | b |`, the first the header: `labels` columns of text, then figures.

    An indented line continues the row before it. Rows without a figure are left out, and so is a
    table without rows. With `once` a repeated row is left out, too. Raises `ValueError` for a row
    that is longer or shorter than the header.
    """
    header, *rows = _rows(text)
    kept = [row for row in rows if any(cell not in ("", NONE) for cell in row[labels:])]
    if wrong := [row for row in kept if len(row) != len(header)]:
        raise ValueError(f"a row has {len(wrong[0])} cells, its header {len(header)}: {wrong[0]}")
    if not kept:
        return ""
    rule = ["---"] * labels + ["---:"] * (len(header) - labels)
    shown = dict.fromkeys(map(_line, kept)) if once else map(_line, kept)
    return "\n".join([_line(header), _line(rule), *shown]) + "\n"


def _rows(text: str) -> list[list[str]]:
    joined = re.sub(r"\s*\n[ \t]+", " ", text)
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float | None, form: str = "", before: str = "", missing: str = NONE) -> str:
    """The value in Python's format `form`, after the text `before`."""
    none = value is None or isinstance(value, Undefined)
    return missing if none else before + format(value, form)


def cells(values: Iterable[Any], form: str, *options: Any, **named: Any) -> str:
    """The values side by side in a row, each through the filter `form`."""
    return " | ".join(FILTERS[form](value, *options, **named) for value in values)


def short(value: float) -> str:
    """Three digits, or all of a larger number: "0.0123", "9.87", "98.7", "987.6", "9,876"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def percent(score: Score | None, *, signed: bool = False) -> str:
    """The mean ± its standard error, in percent."""
    return NONE if score is None else score_report.percent(score, signed=signed)


def plain(score: Score | None, digits: int, *, signed: bool = False) -> str:
    """The mean ± its standard error."""
    return NONE if score is None else score_report.plain(score, digits, signed=signed)


def join_with_slashes(values: Mapping[str, float], form: str, *names: str, scale: float = 1) -> str:
    """The values of these names, or three percentiles, each times `scale`, in the format `form`."""
    shown = names or ("p50", "p90", "p99")
    return " / ".join(format(scale * values[name], form) for name in shown)


def spread(values: Sequence[float], form: str, scale: float = 1) -> str:
    """The median, then the least and the most in brackets, each times `scale`."""
    shown = (statistics.median(values), min(values), max(values))
    middle, least, most = (format(scale * value, form) for value in shown)
    return f"{middle} ({least}–{most})"


def without_output(command: str) -> str:
    """The command as anybody would type it, without the folder of its results."""
    return re.sub(r" -o \S+", "", command)


def versions(environment: Mapping[str, Any], *packages: str) -> str:
    """The named packages with their versions."""
    return ", ".join(f"{name} {environment[name]}" for name in packages if name in environment)


def groups(rows: Iterable[Any], *keys: str) -> dict[Any, list[Any]]:
    """Rows of equal `keys`, each "name" or "labels.name", in the order of first appearance."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        values = tuple(_value(row, key) for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return found


def _value(row: Any, key: str) -> Any:
    for name in key.split("."):
        row = (itemgetter if isinstance(row, Mapping) else attrgetter)(name)(row)
    return row


FILTERS: dict[str, Callable[..., Any]] = {
    "cells": cells,
    "gmean": statistics.geometric_mean,
    "groups": groups,
    "machine": score_report.machine,
    "mean": statistics.fmean,
    "median": statistics.median,
    "number": number,
    "percent": percent,
    "plain": plain,
    "pstdev": statistics.pstdev,
    "quartiles": statistics.quantiles,
    "short": short,
    "slashed": join_with_slashes,
    "spread": spread,
    "table": table,
    "versions": versions,
    "without_output": without_output,
}
