"""What a run under load gives: figures, lines, a table and a file.

Nothing here imports the engine, so that vLLM's process can say the same.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.speculation import figures
from bench.speculation.cases import SpeculationCase
from bench.speculation.figures import PLAIN
from tangram_lab.environment import environment
from tangram_lab.load.clock import TimedAnswer

_NOTES = [
    "Weights are random. The model's output layer is overridden: it says token 0 everywhere.",
    "Acceptance is forced: a drafted token is right with the probability of the case, by a seeded "
    "random number. Drafts and verifications compute everything.",
]


def summarise(answers: Sequence[TimedAnswer], counts: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a run. Decode is from the last first token to the last token.

    An iteration of a sequence is one model token and the accepted drafts before it.
    """
    first_s = max(answer.times_s[0] for answer in answers)
    last_s = max(answer.times_s[-1] for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    after = sum(at_s > first_s for answer in answers for at_s in answer.times_s)
    per_token_ms = [value * 1e3 for one in answers if (value := one.per_token_s) is not None]
    found: dict[str, Any] = {
        "seconds": last_s,
        "prefill_s": first_s,
        "decode_s": last_s - first_s,
        "decode_tokens": after,
        "decode_tokens_per_s": after / (last_s - first_s) if last_s > first_s else None,
        "output_tokens": tokens,
        "tokens_per_s": tokens / last_s,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "tpot_ms": {
            "mean": fmean(per_token_ms),
            **{f"p{percent}": float(np.percentile(per_token_ms, percent)) for percent in (50, 90)},
        }
        if per_token_ms
        else {},
    }
    return found | ({"speculation": _shares(counts, tokens - len(answers))} if counts else {})


def _shares(counts: Mapping[str, int], decoded: int) -> dict[str, Any]:
    # Accepted drafts behind an end token are no tokens of an answer.
    iterations = max(decoded - counts["accepted"], counts["drafts"])
    return {
        **counts,
        "iterations": iterations,
        "acceptance": counts["accepted"] / counts["compared"] if counts["compared"] else None,
        "drafted_per_iteration": counts["drafted"] / iterations if iterations else None,
        "tokens_per_iteration": 1 + counts["accepted"] / iterations if iterations else None,
    }


def describe_run(found: Mapping[str, Any]) -> str:
    """A line of the figures of a run."""
    speed = found["decode_tokens_per_s"]
    text = (
        f"{found['seconds']:7.2f} s, prefill {found['prefill_s']:6.2f} s, decode "
        f"{'–' if speed is None else format(speed, ',.0f'):>8} tokens/s"
    )
    if found["tpot_ms"]:
        times = found["tpot_ms"]
        text += f", TPOT ms mean {times['mean']:.2f} p50 {times['p50']:.2f} p90 {times['p90']:.2f}"
    if drafts := found.get("speculation"):
        text += (
            f", accepted {_number(drafts['acceptance'])}, drafted "
            f"{_number(drafts['drafted_per_iteration'])} and got "
            f"{_number(drafts['tokens_per_iteration'])} tokens per iteration"
        )
    if found.get("preemptions"):
        text += f"; {found['preemptions']} preemptions: the pool is too small for this load"
    return text


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


class CaseKeeper:
    """Writes the figures of one case, whose model has `dtype`, after `command`."""

    def __init__(self, path: Path, case: SpeculationCase, command: str, dtype: str) -> None:
        self._path = path
        self._head = {
            "command": command,
            "environment": environment(),
            "case": asdict(case),
            "dtype": dtype,
            "notes": _NOTES if case.of_shape() else [],
        }

    def __call__(self, figures: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self._head, "engines": figures}
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each engine of each case."""
    table = Table(title="decode, median of the runs")
    for column in (
        "case",
        "engine",
        "tokens/s",
        "spread",
        "of plain",
        "between",
        "accepted",
        "drafted",
        "got",
    ):
        table.add_column(column, justify="left" if column in ("case", "engine") else "right")
    table.add_column("differ", justify="right")
    for case, engines in found.items():
        plain = engines.get(PLAIN, {"runs": []})["runs"]
        for name, engine in engines.items():
            runs, own = engine["runs"], figures.speeds(engine["runs"])
            times = figures.paired_times_as_fast(runs, plain) if plain else []
            shares = figures.pool_runs(runs)
            table.add_row(
                case,
                name,
                f"{statistics.median(own):,.0f}" if own else "",
                f"{min(own):,.0f} - {max(own):,.0f}" if own else "",
                f"{statistics.median(times):.2f}" if times else "",
                " - ".join(f"{bound:.2f}" for bound in figures.median_bounds(times))
                if times
                else "",
                *(
                    _number(shares[key]) if shares else ""
                    for key in ("acceptance", "drafted_per_iteration", "tokens_per_iteration")
                ),
                str(figures.count_differences(runs)),
            )
    Console(width=120).print(table)
