"""The summary of a run's rows: ratios and geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BEST = "best flashinfer"
EVEN = " even"  # ends the name of a case's twin, whose entries are spread evenly
MOST_FLOORS, LEAST_FLOOR_US = 1.6, 30.0  # the goal: so many floors, where one is longer than that
Row = dict[str, Any]


def names(rows: list[Row], ours: bool) -> list[str]:
    """Contenders, in the order in which they first appear."""
    return list(
        dict.fromkeys(c["name"] for row in rows for c in row["contenders"] if c["ours"] is ours)
    )


def device_us(row: Row) -> dict[str, float]:
    """Median device time of each contender, and of the fastest of FlashInfer's."""
    return _with_best({c["name"]: c["median_us"] for c in row["contenders"]})


def floor_us(row: Row) -> float:
    """The least time of a case: by its distinct KV bytes, or by its arithmetic."""
    return float(max(row["byte_floor_us"], row["arithmetic_floor_us"]))


@dataclass(frozen=True)
class FloorCase:
    """A contender's time in a case, and what its bytes take at the rate of a copy, in µs.

    `loaded_us` counts entries as often as tasks load them, `merged_us` partial results.
    """

    heads: str
    tree: str
    us: float
    floor_us: float
    by_arithmetic: bool
    distinct_us: float
    loaded_us: float
    merged_us: float
    tasks_per_multiprocessor: float

    @property
    def floors(self) -> float:
        return self.us / self.floor_us

    @property
    def misses(self) -> bool:
        """Whether it is above the goal."""
        return self.floors > MOST_FLOORS


def floor_cases(run: dict[str, Any], name: str) -> list[FloorCase]:
    """The cases of a tree with a floor above `LEAST_FLOOR_US` in which `name` was measured."""
    rate = run["ceilings"]["copy_bytes_per_us"]
    return [
        FloorCase(
            row["labels"]["heads"],
            row["labels"]["config"],
            found["median_us"],
            floor_us(row),
            row["arithmetic_floor_us"] > row["byte_floor_us"],
            row["unique_bytes"] / rate,
            found["counters"]["task_kv_bytes"] / rate,
            found["counters"]["merged_bytes"] / rate,
            found["counters"]["tasks_per_multiprocessor"],
        )
        for row in run["rows"]
        for found in row["contenders"]
        if found["name"] == name and floor_us(row) > LEAST_FLOOR_US
    ]


def wall_us(row: Row) -> dict[str, float]:
    """Wall time of a decode step, with planning for contenders that plan at every step.

    Empty if it was not measured.
    """
    steps = {
        c["name"]: c["wall_us"] if c["each_step"] else c["wall_kept_us"] for c in row["contenders"]
    }
    return _with_best({name: value for name, value in steps.items() if value is not None})


def _with_best(times: dict[str, float]) -> dict[str, float]:
    library = [value for name, value in times.items() if name.startswith("flashinfer")]
    return {**times, BEST: min(library)} if library else times


def ratios(rows: list[Row], variant: str, peer: str, *, wall: bool = False) -> list[float]:
    """The peer's time over the variant's, by row with both: above 1 the variant is faster."""
    times = [(wall_us if wall else device_us)(row) for row in rows]
    return [found[peer] / found[variant] for found in times if {peer, variant} <= found.keys()]


def means(rows: list[Row], *, wall: bool = False) -> dict[str, dict[str, float]]:
    """Per variant, per peer: the geometric mean of `ratios`."""
    found = {
        variant: {
            peer: ratios(rows, variant, peer, wall=wall)
            for peer in [*names(rows, ours=False), BEST]
        }
        for variant in names(rows, ours=True)
    }
    return {
        variant: {
            peer: statistics.geometric_mean(values) for peer, values in against.items() if values
        }
        for variant, against in found.items()
    }


def by_group(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each group, in the order in which groups first appear."""
    return {
        group: [row for row in rows if row["group"] == group]
        for group in dict.fromkeys(r["group"] for r in rows)
    }


def mean_us(rows: list[Row], name: str, *, wall: bool = False) -> float | None:
    """The mean time of a contender, device or wall; None if a row lacks it."""
    times = [(wall_us if wall else device_us)(row).get(name) for row in rows]
    there = [time for time in times if time is not None]
    return statistics.fmean(there) if len(there) == len(rows) else None


def without_twins(rows: list[Row]) -> list[Row]:
    """Rows of cases whose entries lie as in the profile."""
    return [row for row in rows if not row["case"].endswith(EVEN)]


def balance(rows: list[Row], among: list[Row]) -> list[float]:
    """AOT's time over its time in the even twin, `among` others, for every row with a twin."""
    aot = {row["case"]: device_us(row)["aot"] for row in among if "aot" in device_us(row)}
    twins = [(aot[row["case"]], aot.get(row["case"] + EVEN)) for row in rows]
    return [own / even for own, even in twins if even is not None]


@dataclass(frozen=True)
class MeanStep:
    """Means over the cases of a group: µs of the device, of a step with planning, and of a plan.

    Then tasks a multiprocessor, merged KB and launches. None where it was not measured.
    """

    group: str
    contender: str
    values: tuple[float | None, ...]


def mean_steps(rows: list[Row]) -> list[MeanStep]:
    """Each contender of each group, where batches change (`bench.kernels.living`)."""
    return [
        _mean_step(group, name, [(row, c) for row in own for c in row["contenders"]])
        for group, own in by_group(rows).items()
        for name in dict.fromkeys(c["name"] for row in own for c in row["contenders"])
    ]


def _mean_step(group: str, name: str, measured: Sequence[tuple[Row, dict[str, Any]]]) -> MeanStep:
    found = [(row, c) for row, c in measured if c["name"] == name]
    counters = [c["counters"] for _, c in found if c["counters"]]
    columns = (
        [c["median_us"] for _, c in found],
        [_step_us(row, c) for row, c in found],
        [c["plan_us"] for _, c in found],
        [one["tasks_per_multiprocessor"] for one in counters],
        [one["merged_bytes"] / 1e3 for one in counters],
        [one.get("launches") for one in counters],  # runs before 2026-11-28 did not count them
    )
    return MeanStep(group, name, tuple(map(_mean, columns)))


def _step_us(row: Row, contender: dict[str, Any]) -> float | None:
    """Wall time of a step, planning spread over the steps between two changes of the batch."""
    planned, kept = contender["wall_us"], contender["wall_kept_us"]
    if planned is None or kept is None:
        return None
    if contender["each_step"]:
        return float(planned)
    return float(kept + max(0.0, planned - kept) / row["labels"]["steps_between"])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
