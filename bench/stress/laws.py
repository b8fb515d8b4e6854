"""The laws of a soak, checked on its samples: nothing lost, pages conserved, memory flat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from scipy.stats import linregress

from bench.percentiles import percentiles
from bench.stress.conversations import Outcome
from bench.stress.server import GaugeReading

# Allowed growth of the minimum heap in use, from the first third of the time to the last stretch.
MOST_GROWTH_MB = 8.0
# The share of the run in which caches fill; memory is checked after it.
SETTLING_SHARE = 0.2
# The rest is cut into this many stretches, and each counts with its minimum. Long prompts take
# memory for a while, which is no growth, and samples a second apart are not independent. A leak is
# in every stretch, a step in the last.
STRETCHES = 9


@dataclass(frozen=True)
class ServerSample:
    """The server at `at_s` of the run: resident memory, the heap in use, requests and pages."""

    at_s: float
    rss_mb: float
    heap_mb: float
    gauges: GaugeReading

    def row(self) -> dict[str, float]:
        """The sample as it is written to a file."""
        memory = {"rss_mb": round(self.rss_mb, 2), "heap_mb": round(self.heap_mb, 2)}
        return {"at_s": round(self.at_s, 1), **memory, **asdict(self.gauges)}


@dataclass(frozen=True)
class Growth:
    """The minimum memory of each of `STRETCHES`.

    It has the line through them, by least squares over `over_s` seconds, and the minima of the
    first third of the time and of the last stretch.
    """

    mb_per_hour: float
    standard_error: float
    over_s: float
    first_mb: float
    last_mb: float


def growth(samples: Sequence[ServerSample], memory: Literal["rss_mb", "heap_mb"]) -> Growth:
    """The trend of one kind of `memory` after the first `SETTLING_SHARE` of `samples`.

    Raises `ValueError` if fewer than `STRETCHES` are left.
    """
    kept = samples[int(len(samples) * SETTLING_SHARE) :]
    if len(kept) < STRETCHES:
        raise ValueError(f"{len(kept)} samples are too few for a slope: let it run longer")
    stretches = np.array_split(np.array([*map(attrgetter("at_s", memory), kept)]), STRETCHES)
    least = [float(part[:, 1].min()) for part in stretches]
    line = linregress([part[:, 0].mean() / 3600 for part in stretches], least)
    over_s, third = kept[-1].at_s - kept[0].at_s, STRETCHES // 3
    return Growth(float(line.slope), float(line.stderr), over_s, min(least[:third]), least[-1])


def latencies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Percentiles of the time to the first token, in seconds, over answered streams."""
    seen = [
        outcome.ttft_s
        for outcome in outcomes
        if outcome.kind == "answered" and outcome.ttft_s is not None
    ]
    return (percentiles(seen) | {"requests": len(seen)}) if seen else {}


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """The numbers of turns that were answered, hung up and lost, streamed or whole."""
    found = Counter(f"{one.kind}, {'streamed' if one.stream else 'whole'}" for one in outcomes)
    return dict(sorted(found.items()))


def find_broken_laws(
    outcomes: Sequence[Outcome],
    samples: Sequence[ServerSample],
    heap: Growth,
    completions: dict[str, int],
    changed: int,
) -> list[str]:
    """Every broken law, in words.

    `completions` is the server's own count, by how they ended. `changed` answers were another text
    when they were requested again, alone.
    """
    found = []
    lost = [outcome for outcome in outcomes if outcome.kind == "lost"]
    if lost:
        found.append(
            f"{len(lost)} of {len(outcomes)} turns were lost, the first by {lost[0].reason}"
        )
    if changed:
        found.append(f"{changed} answers differed when requested again")
    for sample in samples:
        found += [
            f"at {sample.at_s:.0f} s: {problem}" for problem in sample.gauges.problems(idle=False)
        ]
    if (grown := heap.last_mb - heap.first_mb) > MOST_GROWTH_MB:
        found.append(
            f"the heap grew by {grown:.1f} MB from the first third to the end, at most "
            f"{MOST_GROWTH_MB} is allowed"
        )
    return found + _find_miscounts(outcomes, completions)


def _find_miscounts(outcomes: Sequence[Outcome], completions: dict[str, int]) -> list[str]:
    """The differences between the ends that the server counts and those that its clients saw."""
    answered = sum(outcome.kind == "answered" for outcome in outcomes)
    whole, given_up = completions.get("length", 0), completions.get("abort", 0)
    found = []
    if whole < answered:
        found.append(f"{answered} answers arrived, but the server counts {whole}")
    if whole + given_up > len(outcomes):
        found.append(
            f"{len(outcomes)} turns were sent, but the server counts {whole} whole and {given_up} "
            "given up"
        )
    return found


def summary(outcomes: Sequence[Outcome], samples: Sequence[ServerSample]) -> dict[str, Any]:
    """The published figures of a soak."""
    return {
        "turns": len(outcomes),
        "outcomes": counts(outcomes),
        "ttft_s": latencies(outcomes),
        "rss_mb": asdict(growth(samples, "rss_mb")),
        "heap_mb": asdict(growth(samples, "heap_mb")),
        "most_running": max(sample.gauges.running for sample in samples),
        "most_waiting": max(sample.gauges.waiting for sample in samples),
        "most_pages_held": max(sample.gauges.held for sample in samples),
        "samples": [sample.row() for sample in samples],
    }
