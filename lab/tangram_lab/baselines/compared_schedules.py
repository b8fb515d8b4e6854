"""Schedules by name: those that serve, baselines, and kernels without one of their parts.

    plain | aot | workqueue | uniform | buckets:{exact,padded}
    packing:{thrifty,measured,off,naive,paper}

followed by any of `+ctas=3 +tasks=4 +min=256 +tile=128 +queries=128` (planner) and `+onetile
+entries=64 +stages=3 +warps=4` (execution). Entries, stages and warps apply to every tile. `ctas`
is how many programs a multiprocessor runs at once. With `onetile` all tasks of a layer run in one
launch. Example: `packing:thrifty+queries=128+ctas=2`. Kernel benchmarks also know `+apart` (partial
results are merged by a kernel of their own), `+serial` (no launch starts before the one before it
has ended) and `+replan` (every layer is planned by itself at every step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tangram.errors import ConfigError
from tangram.kernels.dispatch import host_kernels
from tangram.kernels.interface import KvPool, PoolKernels
from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding, Schedule, plan_by_budgets, plan_shared
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram_lab.baselines.packing_rules import ALL_PACKING_RULES
from tangram_lab.baselines.uniform import plan_buckets, plan_uniform_splits

if TYPE_CHECKING:
    from tangram.kernels.triton.packed import DecodeOptions

ARGUMENTS = {
    "tasks": "tasks_per_worker",
    "min": "min_tokens",
    "tile": "tile_tokens",
    "queries": "max_query_rows",
}
ONE_TILE = "onetile"
TILE_NUMBERS = ("entries", "stages", "warps")
APART, SERIAL, REPLAN = "apart", "serial", "replan"


def _plain(batch: Decoding, workers: int, cost: CostModel) -> WorkPlan:
    return plan_plain(batch.rows)


def _workqueue(batch: Decoding, workers: int, cost: CostModel, **numbers: Any) -> WorkPlan:
    return plan_workqueue(batch.rows, batch.lengths, Grain(workers, **numbers))


def _packing(
    batch: Decoding, workers: int, cost: CostModel, *, rule: str, **numbers: int
) -> WorkPlan:
    return plan_shared(batch, workers, cost, rule=ALL_PACKING_RULES[rule], **numbers)


def _uniform(batch: Decoding, workers: int, cost: CostModel, **numbers: int) -> WorkPlan:
    return plan_uniform_splits(batch.rows, batch.lengths, workers, **numbers)


def _buckets(
    batch: Decoding,
    workers: int,
    cost: CostModel,
    *,
    rule: Literal["exact", "padded"],
    **numbers: int,
) -> WorkPlan:
    return plan_buckets(batch.rows, batch.lengths, workers, kind=rule, **numbers)


@dataclass(frozen=True)
class Planner:
    """Makes plans: `make` takes the batch, the workers, costs, numbers, and of several a `rule`.

    `numbers` are the names of the numbers it takes, `rules` its rules, if it has any. Those that
    `refine` cut finer where tasks are long, unless the schedule says how finely.
    """

    make: Callable[..., WorkPlan]
    numbers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ("",)
    defaults: Mapping[str, int] = field(default_factory=dict)
    refine: bool = False


EACH_STEP = ("uniform", "buckets")  # planners that make a new plan at every step
_GRAIN, _TILE = ("ctas", "tasks", "min", "tile"), {"tile": 64}
PLANNERS: Mapping[str, Planner] = {
    "plain": Planner(_plain),
    "aot": Planner(plan_by_budgets, _GRAIN, defaults={"tasks": 1, "min": 128} | _TILE),
    "workqueue": Planner(_workqueue, _GRAIN, defaults=_TILE, refine=True),
    "packing": Planner(
        _packing, (*_GRAIN, "queries"), tuple(ALL_PACKING_RULES), defaults=_TILE, refine=True
    ),
    "uniform": Planner(_uniform, ("ctas", "tile"), defaults=_TILE),
    "buckets": Planner(_buckets, ("ctas", "tile"), ("exact", "padded"), defaults=_TILE),
}


@dataclass(frozen=True, kw_only=True)
class WrittenSchedule(Schedule):
    """A schedule, parsed from its written form `text` (see the module).

    `name` is that of its planner. The kernels of a GPU run `tiles` of other sizes, and with
    `one_tile` all tasks of a layer in one launch.
    """

    text: str
    name: str
    one_tile: bool
    tiles: Mapping[str, Any]

    def options(self) -> DecodeOptions:
        """Those of the kernels of a GPU; the tile numbers apply to every tile but `short`."""
        from tangram.kernels.triton.packed import DecodeOptions

        plain = DecodeOptions()
        tiles = tuple(replace(tile, **self.tiles) for tile in plain.tiles)
        most = 1 << 30 if self.one_tile else plain.one_tile_tasks
        return replace(plain, tiles=tiles, one_tile_tasks=most)

    def kernels(self, pool: KvPool) -> PoolKernels:
        """The kernels of `pool` by this schedule. Raises `ConfigError` if they lack its options."""
        if pool.entries.is_cuda:
            from tangram.kernels.triton.triton_kernels import TritonKernels

            return TritonKernels(pool, self, options=self.options())
        if foreign := [*self.tiles, *([ONE_TILE] if self.one_tile else [])]:
            raise ConfigError(
                f"decode_schedule is {self.text!r}: +{min(foreign)} is an option of the GPU's "
                f"kernels, leave it out on {pool.entries.device.type}"
            )
        return host_kernels(pool, self)


def parse_schedule(text: str) -> WrittenSchedule:
    """Parse a schedule. Raises `ConfigError` naming the part that is not known."""
    head, *extras = text.split("+")
    name, _, rule = head.partition(":")
    if name not in PLANNERS:
        raise ConfigError(f"planner is {name!r}, known are {', '.join(PLANNERS)}")
    planner = PLANNERS[name]
    if rule not in planner.rules:
        known_rules = ", ".join(known or "none" for known in planner.rules)
        raise ConfigError(f"rule of {text!r} is {rule!r}, known are {known_rules}")
    given, known = dict[str, int](), (*planner.numbers, *TILE_NUMBERS)
    for extra in extras:
        option, equals, value = extra.partition("=")
        if option not in (known if equals else (ONE_TILE,)) or (equals and not value.isdecimal()):
            listed = ", ".join([ONE_TILE, *(f"{number}=N" for number in known)])
            raise ConfigError(f"option {extra!r} of {text!r} is not known: {name} knows {listed}")
        if equals:
            given[option] = int(value)
    taken = {**planner.defaults, **given}
    numbers = {ARGUMENTS[number]: value for number, value in taken.items() if number in ARGUMENTS}
    if planner.refine:
        numbers["finer"] = not given.keys() & {"ctas", "tasks"}
    return WrittenSchedule(
        head,
        partial(planner.make, rule=rule) if rule else planner.make,
        numbers,
        given.get("ctas"),
        text=text,
        name=name,
        one_tile=ONE_TILE in extras,
        tiles={number: given[number] for number in TILE_NUMBERS if number in given},
    )


@dataclass(frozen=True)
class KernelVariant:
    """A schedule, and what a benchmark changes in how the kernels run it."""

    text: str
    schedule: WrittenSchedule
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
        options = self.schedule.options()
        if APART in self.changes:
            options = replace(options, merge="kernel")
        return replace(options, chained=SERIAL not in self.changes)
