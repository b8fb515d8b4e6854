"""Schedules by name: those that serve, baselines, and kernels without one of their parts.

Beyond `plan/schedule.py` there are `uniform`, `buckets:{exact,padded}` and
`packing:{measured,off,naive,paper}`. Kernel benchmarks also know `+apart` (partial results are
merged by a kernel of their own), `+serial` (no launch starts before the one before it has ended)
and `+replan` (every layer is planned by itself at every step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import (
    SERVING_PLANNERS,
    TILE_TOKENS,
    Decoding,
    Planner,
    Schedule,
    packing_planner,
)
from tangram_lab.baselines.packing_rules import ALL_PACKING_RULES
from tangram_lab.baselines.uniform import plan_buckets, plan_uniform_splits

if TYPE_CHECKING:
    from tangram.kernels.triton.packed import DecodeOptions

APART, SERIAL, REPLAN = "apart", "serial", "replan"


def _uniform(batch: Decoding, workers: int, cost: CostModel, rule: str, **numbers: int) -> WorkPlan:
    return plan_uniform_splits(batch.rows, batch.lengths, workers, **numbers)


def _buckets(
    batch: Decoding, workers: int, cost: CostModel, rule: Literal["exact", "padded"], **numbers: int
) -> WorkPlan:
    return plan_buckets(batch.rows, batch.lengths, workers, kind=rule, **numbers)


EACH_STEP = ("uniform", "buckets")  # planners that make a new plan at every step
_TILE = {"tile": TILE_TOKENS}
ALL_PLANNERS: Mapping[str, Planner] = {
    **SERVING_PLANNERS,
    "packing": packing_planner(ALL_PACKING_RULES),
    "uniform": Planner(_uniform, ("ctas", "tile"), defaults=_TILE),
    "buckets": Planner(_buckets, ("ctas", "tile"), ("exact", "padded"), defaults=_TILE),
}


def parse_schedule(text: str) -> Schedule:
    """`Schedule.parse` that also knows the baselines."""
    return Schedule.parse(text, ALL_PLANNERS)


@dataclass(frozen=True)
class KernelVariant:
    """A schedule, and what a benchmark changes in how the kernels run it."""

    text: str
    schedule: Schedule
    changes: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> KernelVariant:
        """Raises `ConfigError` naming the part that is not known."""
        head, *extras = text.split("+")
        changes = {APART, SERIAL, REPLAN}.intersection(extras)
        kept = [extra for extra in extras if extra not in changes]
        return cls(text, parse_schedule("+".join([head, *kept])), frozenset(changes))

    @property
    def replans(self) -> bool:
        """Whether every layer is planned by itself."""
        return REPLAN in self.changes

    @property
    def each_step(self) -> bool:
        """Whether the plan must be made again at every step."""
        return self.replans or self.schedule.name in EACH_STEP

    def options(self) -> DecodeOptions:
        """Those of the schedule, with the changes."""
        from tangram.kernels.triton.packed import DecodeOptions

        options = DecodeOptions.of(self.schedule)
        if APART in self.changes:
            options = replace(options, merge="kernel")
        return replace(options, chained=SERIAL not in self.changes)
