"""Our contenders by name: a planner, its rule, and what the kernels are told.

    plain | aot | workqueue | uniform | packing:{off,naive,paper,measured} | buckets:{exact,padded}

followed by any of `+workers=264 +tasks=4 +min=256 +tile=128 +queries=128` (planner) and `+atomic +serial
+onetile +entries=64 +stages=3 +warps=4` (kernels; entries, stages and warps apply to every tile class). Example:
`packing:measured+tasks=2+atomic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from bench.kernels.case import Case
from tangram.errors import ConfigError
from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import build_forest, units_of
from tangram.plan.form import WorkPlan
from tangram.plan.packing import plan_packing
from tangram.plan.plain import plan_plain
from tangram.plan.profit import PackingRule
from tangram.plan.uniform import plan_buckets, plan_uniform_splits
from tangram.plan.workqueue import plan_workqueue

PLANNERS = ("plain", "aot", "workqueue", "uniform", "packing", "buckets")
KERNEL_FLAGS = ("atomic", "serial", "onetile")
NUMBERS = ("workers", "tasks", "min", "tile", "queries", "entries", "stages", "warps")


@dataclass(frozen=True)
class Variant:
    """A contender of ours, parsed from its written form (see the module)."""

    text: str
    planner: str
    rule: str
    flags: frozenset[str]
    numbers: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Raises `ConfigError` naming the part that is not known."""
        head, *extras = text.split("+")
        planner, _, rule = head.partition(":")
        if planner not in PLANNERS:
            raise ConfigError(f"planner is {planner!r}, known are {', '.join(PLANNERS)}")
        rules = {"packing": get_args(PackingRule), "buckets": ("exact", "padded")}.get(planner, ("",))
        if rule not in rules:
            raise ConfigError(f"rule of {text!r} is {rule!r}, known are {', '.join(rules)}")
        flags, numbers = set(), {}
        for extra in extras:
            name, equals, value = extra.partition("=")
            if name not in (NUMBERS if equals else KERNEL_FLAGS):
                raise ConfigError(f"option {extra!r} of {text!r} is not known: {', '.join(KERNEL_FLAGS + NUMBERS)}")
            if equals:
                numbers[name] = int(value)
            else:
                flags.add(name)
        return cls(text, planner, rule, frozenset(flags), numbers)

    @property
    def each_step(self) -> bool:
        """Whether the planner, as its method describes it, plans again at every step."""
        return self.planner in ("uniform", "buckets")

    def planner_of(self, case: Case, workers: int, cost: CostModel) -> Callable[[], WorkPlan]:
        """The host work of making the plan, from the block tables and lengths on."""
        rows, lengths, numbers = case.rows, case.lengths, self.numbers
        workers = numbers.get("workers", workers)
        tile = {"tile_tokens": numbers["tile"]} if "tile" in numbers else {}
        per_worker = {"tasks_per_worker": numbers["tasks"]} if "tasks" in numbers else {}
        least = {"min_tokens": numbers["min"]} if "min" in numbers else {}
        kind: Any = self.rule
        match self.planner:
            case "plain":
                return lambda: plan_plain(rows)
            case "aot":
                return lambda: plan_aot(rows, workers, **per_worker, **tile)
            case "workqueue":
                return lambda: plan_workqueue(rows, lengths, workers, **per_worker, **tile, **least)
            case "uniform":
                return lambda: plan_uniform_splits(rows, lengths, workers, **tile)
            case "buckets":
                return lambda: plan_buckets(rows, lengths, workers, kind=kind, **tile)
        queries = {"max_query_rows": numbers["queries"]} if "queries" in numbers else {}
        return lambda: _packed(case, workers, cost, kind, {**per_worker, **tile, **least, **queries})

    def options(self) -> Any:
        """`DecodeOptions`; needs Triton."""
        from tangram.kernels.packed import DecodeOptions

        default = DecodeOptions()
        changed = {name: self.numbers[name] for name in ("entries", "stages", "warps") if name in self.numbers}
        tiles = tuple(replace(tile, **changed) for tile in default.tiles)
        return replace(
            default,
            tiles=tiles,
            merge="atomic" if "atomic" in self.flags else "kernel",
            chained="serial" not in self.flags,
            one_tile_tasks=1 << 30 if "onetile" in self.flags else default.one_tile_tasks,
        )


def _packed(case: Case, workers: int, cost: CostModel, rule: PackingRule, options: dict[str, int]) -> WorkPlan:
    """Forest and plan; every prefix here is made of raw pages, none of sealed chunks."""
    rows, (count, layers, heads) = case.rows, case.shape
    nothing = np.zeros(count, np.int64)
    raw_pages = case.cell_lengths[:, 0, 0] // case.geometry.page_tokens
    units, unit_count = units_of(case.tables, rows.table[:, 0, 0], nothing, nothing, raw_pages)
    forest = build_forest(units, unit_count, nothing)
    kept = np.zeros((layers, heads), np.int64)
    return plan_packing(
        rows, case.lengths, forest, kept, workers, group=case.geometry.group, cost=cost, rule=rule, **options
    )


@dataclass(frozen=True)
class Counters:
    """What a plan makes the device do: tasks, partial results, and the KV bytes its tasks read."""

    tasks: int
    partials: int
    tasks_per_worker: float
    task_kv_bytes: int
    merged_bytes: int

    @classmethod
    def of(cls, plan: WorkPlan, case: Case, workers: int) -> Counters:
        """Partials count their float32 output and log-sum-exp, written once and read once."""
        begin, end = plan.spans(case.lengths)
        partials = int((~plan.direct).sum())
        merged = partials * case.geometry.group * (case.geometry.head_dim + 1) * 4 * 2
        tasks = int((end > begin).sum())
        return cls(tasks, partials, tasks / workers, int((end - begin).sum()) * case.entry_bytes, merged)
