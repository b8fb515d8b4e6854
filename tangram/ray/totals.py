"""The statistics of several engines as those of one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from tangram.metrics import FIGURES, EngineStats, GroupOverflow, Held, Shape, SpeculationStats


class FleetTotals:
    """Adds up the last reports of replicas. `present` are those that have answered last."""

    def __init__(self) -> None:
        self._reports: dict[str, EngineStats] = {}
        self.present: Mapping[str, EngineStats] = {}

    def take(self, reports: Mapping[str, EngineStats]) -> None:
        """These replicas have reported, all others are gone. Counters never go back."""
        self.present = dict(reports)
        nothing: dict[str, Any] = {
            name: 0 for name, figure in FIGURES.items() if isinstance(figure, Held)
        }
        for name, stats in self._reports.items():
            if name not in reports:
                self._reports[name] = replace(stats, **nothing)
        self._reports |= reports

    def add(self) -> EngineStats:
        """The sum. Raises `ValueError` before the first report."""
        if not self._reports:
            raise ValueError("no replica has reported")
        return add_stats(list(self._reports.values()))


def add_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    """One `EngineStats` with the sums of `all_stats`, which is not empty."""
    values: dict[str, Any] = {}
    for name, figure in FIGURES.items():
        found = [getattr(stats, name) for stats in all_stats]
        values[name] = found[0] if isinstance(figure, Shape) else sum(found)
    plans = Counter[str]()
    for stats in all_stats:
        plans.update(stats.plans)
    return EngineStats(
        **values,
        plans=dict(plans),
        overflow=_add_overflow(line for stats in all_stats for line in stats.overflow),
        speculation=_add_speculation(
            [stats.speculation for stats in all_stats if stats.speculation is not None]
        ),
    )


def _add_overflow(lines: Iterable[GroupOverflow]) -> tuple[GroupOverflow, ...]:
    groups = defaultdict[tuple[float, str, int], list[GroupOverflow]](list)
    for line in lines:
        groups[line.kv_retention, line.kv_scorer, line.group].append(line)
    return tuple(
        GroupOverflow(
            *group,
            chunks=sum(line.chunks for line in found),
            wished=sum(line.wished for line in found),
            lost=sum(line.lost for line in found),
            exceeded=sum(line.exceeded for line in found),
        )
        for group, found in groups.items()
    )


def _add_speculation(parts: Sequence[SpeculationStats]) -> SpeculationStats | None:
    if not parts:
        return None
    return SpeculationStats(
        sum(part.drafts for part in parts),
        sum(part.drafted for part in parts),
        sum(part.accepted for part in parts),
        tuple(map(sum, zip_longest(*(part.accepted_at for part in parts), fillvalue=0))),
    )
