"""Figures of the measurements of speculation, as tables show them."""

from __future__ import annotations

import errno
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLAIN = "plain"
AGAIN = "plain_again"  # a second engine like it: how far runs of one thing differ
Run = Mapping[str, Any]


def served_cases(results: Path) -> dict[str, dict[str, Any]]:
    """The files speculation-CASE.json, by case; vLLM's of the same case is its engine `vllm`.

    Raises `FileNotFoundError` if nothing of speculation was measured.
    """
    _require_any(results)
    found = {
        path.stem.removeprefix("speculation-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(results.glob("speculation-*.json"))
    }
    cases = {name: case for name, case in found.items() if not name.endswith("-vllm")}
    for name, case in cases.items():
        if peer := found.get(f"{name}-vllm"):
            case["engines"]["vllm"] = peer["engines"]["vllm"]
    return cases


def read_figures(results: Path, name: str) -> dict[str, Any] | None:
    """The file NAME.json; None if it was not measured.

    Raises `FileNotFoundError` if nothing of speculation was measured.
    """
    _require_any(results)
    path = results / f"{name}.json"
    if not path.exists():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def _require_any(results: Path) -> None:
    if not any(results.glob("speculation[-_]*.json")):
        raise FileNotFoundError(errno.ENOENT, "no results", str(results / "speculation*.json"))


def shown_command(run: Run) -> str:
    """The command of a measurement, without where it wrote."""
    parts = shlex.split(run["command"])
    for option in ("-o", "--output"):
        if option in parts:
            at = parts.index(option)
            del parts[at : at + 2]
    return shlex.join(parts)


def speeds(runs: Sequence[Run]) -> list[float]:
    """Tokens per second of decode, of the runs that decoded."""
    found = (run["decode_tokens_per_s"] for run in runs)
    return [speed for speed in found if speed is not None]


def times_as_fast(runs: Sequence[Run], others: Sequence[Run]) -> float | None:
    """How many times as fast `runs` decode as `others`: medians compared."""
    own, theirs = speeds(runs), speeds(others)
    return statistics.median(own) / statistics.median(theirs) if own and theirs else None


def paired_times_as_fast(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """How many times as fast each run decodes as the one of `others` with the same prompts."""
    pairs = [
        (run["decode_tokens_per_s"], other["decode_tokens_per_s"])
        for run, other in zip(runs, others, strict=True)
    ]
    return [own / theirs for own, theirs in pairs if own is not None and theirs is not None]


def tpot_ms(runs: Sequence[Run], figure: str) -> float | None:
    """The median over runs of a figure of the answers' times per token: mean, p50 or p90."""
    found = [run["tpot_ms"][figure] for run in runs if figure in run["tpot_ms"]]
    return statistics.median(found) if found else None


def paired_times_as_short(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """How many times as long each of `others` takes for a token, in the mean of its answers."""
    pairs = [
        (run["tpot_ms"].get("mean"), other["tpot_ms"].get("mean"))
        for run, other in zip(runs, others, strict=True)
    ]
    return [theirs / own for own, theirs in pairs if own and theirs]


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which two values the median of many more such values is, in 19 of 20 cases.

    The ranks are those of the binomial distribution, by its normal approximation (Conover,
    Practical Nonparametric Statistics, section 3.2). Few values are all inside.
    """
    ordered, count = sorted(values), len(values)
    if not ordered:
        raise ValueError("values is empty: a median has no bounds without values")
    outside = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[outside], ordered[count - 1 - outside]


def count_differences(runs: Sequence[Run]) -> int:
    """How many answers differ from those without speculation."""
    return sum(len(run.get("differences", ())) for run in runs)


def pool(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shares of all runs together, from the sums of their counts."""
    total = {
        name: sum(one[name] for one in counts)
        for name in ("drafted", "compared", "accepted", "iterations")
    }
    decoded = total["iterations"] + total["accepted"]
    return {
        "acceptance": _share(total["accepted"], total["compared"]),
        "drafted_per_iteration": _share(total["drafted"], total["iterations"]),
        "tokens_per_iteration": _share(decoded, total["iterations"]),
    }


def pool_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """`pool` of the runs that speculate; nothing where none does."""
    counts = [run["speculation"] for run in runs if "speculation" in run]
    return pool(counts) if counts else {}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def acceptance_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each scorer, ρ and γ: acceptance by kind of text, and the shares of all.

    Scorers come in the order of `cells`, of each the largest ρ first.
    """
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        key = cell["scorer"], cell["kv_retention"], cell["drafted"]
        rows.setdefault(key, []).append(cell)
    scorers = list(dict.fromkeys(scorer for scorer, _, _ in rows))
    ordered = sorted(
        rows.items(), key=lambda row: (scorers.index(row[0][0]), -row[0][1], row[0][2])
    )
    return [
        {
            **dict(zip(("scorer", "kv_retention", "drafted"), key, strict=True)),
            "contexts": sorted({cell["context_tokens"] for cell in found}),
            "kinds": _by_kind(found),
            **pool_runs(found),
        }
        for key, found in ordered
    ]


def _by_kind(cells: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    kinds = dict.fromkeys(cell["kind"] for cell in cells)
    return {
        kind: pool_runs([cell for cell in cells if cell["kind"] == kind])["acceptance"]
        for kind in kinds
    }


def count_answers(cells: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many prompts there are, and how many of them were answered in more than one way."""
    answers: dict[str, set[str]] = {}
    for cell in cells:
        answers.setdefault(cell["prompt_sha256"], set()).add(cell["answer_sha256"])
    return len(answers), sum(len(found) > 1 for found in answers.values())
