"""The table of the comparison, from its raw figures: for the terminal and for docs/cpu.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# A figure's words and format; a row shows those that its load is about.
FIGURES = {
    "first_token_s": ("first token, s", ".2f"),
    "prefill_tokens_per_s": ("prefill, tokens/s", ".0f"),
    "decode_tokens_per_s": ("decode, tokens/s", ".1f"),
    "total_s": ("until the last token, s", ".1f"),
}
SAME = "same_tokens"
NONE = "–"


def table_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """The header, then a line for each load and figure; a column for each system that ran.

    A cell is the median, and the range of several repeats. The last line is the least number of
    first tokens that equal the reference's.
    """
    systems = content["systems"]
    lines = [["", *(system["title"] for system in systems.values())]]
    for title, row in content["rows"].items():
        for figure, (words, form) in FIGURES.items():
            values = [row.get(name, {}).get(figure, []) for name in systems]
            if any(values):
                lines.append([f"{title}: {words}", *(spread(each, form) for each in values)])
    least = [
        [min(row[name][SAME]) for row in content["rows"].values() if row.get(name, {}).get(SAME)]
        for name in systems
    ]
    if any(least):
        words = "first tokens that equal Transformers', of 16, the least"
        lines.append([words, *(f"{min(each)}" if each else NONE for each in least)])
    return lines


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the range of several; a dash for none."""
    if not values:
        return NONE
    middle, low, high = (
        format(value, form) for value in (median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low}–{high})"
