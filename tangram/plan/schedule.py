"""A schedule by name: a planner, its rule, how finely it cuts, and options of the kernels.

    plain | aot | workqueue | packing:thrifty

followed by any of `+ctas=3 +tasks=4 +min=256 +tile=128 +queries=128` (planner) and `+onetile
+entries=64 +stages=3 +warps=4` (execution). Entries, stages and warps apply to every tile. `ctas`
is how many programs a multiprocessor runs at once. With `onetile` all tasks of a layer run in one
launch. Example: `packing:thrifty+queries=128+ctas=2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from tangram.errors import ConfigError
from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.packing import MAX_QUERY_ROWS, plan_packing
from tangram.plan.profit import PACKING_RULES, PackingRule
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import plan_workqueue
from tangram.types import Int32, Int64

ARGUMENTS = {
    "tasks": "tasks_per_worker",
    "min": "min_tokens",
    "tile": "tile_tokens",
    "queries": "max_query_rows",
}
ONE_TILE = "onetile"
TILE_NUMBERS = ("entries", "stages", "warps")
CTAS = 3  # fastest on an H100
TILE_TOKENS = 64
MIN_TOKENS = 128
MOST_ROWS = 1 << 20  # where a batch does not say


@dataclass(frozen=True, eq=False)
class Decoding:
    """A batch that decodes, as planners see it.

    `lengths` is the flat int32 array, `group` is G, and `kept_tokens` [R, L, H] is what each head
    keeps of a sealed chunk. `prefixes` builds the prefix forest. A row has up to `queries` tokens,
    its newest and drafts; there are at most `most_rows` rows in any batch.
    """

    rows: DecodeRows
    lengths: Int32
    group: int
    kept_tokens: Int32 | Int64
    prefixes: Callable[[], Forest]
    queries: int = 1
    most_rows: int = MOST_ROWS

    @cached_property
    def forest(self) -> Forest:
        """The prefix forest, built at first use."""
        return self.prefixes()


@dataclass(frozen=True)
class Planner:
    """Makes plans: `make` takes the batch, the workers, the cost model, the rule and numbers.

    `numbers` are the names of the numbers it takes, `rules` its rules, if it has any. Those that
    `refine` cut finer where tasks are long, unless the schedule says how finely.
    """

    make: Callable[..., WorkPlan]
    numbers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ("",)
    defaults: Mapping[str, int] = field(default_factory=dict)
    refine: bool = False


def _plain(batch: Decoding, workers: int, cost: CostModel, rule: str) -> WorkPlan:
    return plan_plain(batch.rows)


def _aot(batch: Decoding, workers: int, cost: CostModel, rule: str, **numbers: int) -> WorkPlan:
    return plan_aot(batch.rows, workers, **numbers)


def _workqueue(
    batch: Decoding, workers: int, cost: CostModel, rule: str, finer: bool, **numbers: int
) -> WorkPlan:
    return plan_workqueue(batch.rows, batch.lengths, workers, finer=finer, **numbers)


def _packing(
    batch: Decoding,
    workers: int,
    cost: CostModel,
    rule: str,
    finer: bool,
    *,
    rules: Mapping[str, PackingRule],
    **numbers: int,
) -> WorkPlan:
    group = batch.group * batch.queries
    numbers["max_query_rows"] = max(group, numbers.get("max_query_rows", MAX_QUERY_ROWS))
    return plan_packing(
        batch.rows,
        batch.lengths,
        batch.forest,
        batch.kept_tokens,
        workers,
        group=group,
        cost=cost,
        rule=rules[rule],
        finer=finer,
        **numbers,
    )


def packing_planner(rules: Mapping[str, PackingRule]) -> Planner:
    """The planner `packing` with `rules`."""
    return Planner(
        partial(_packing, rules=rules),
        ("ctas", "tasks", "min", "tile", "queries"),
        tuple(rules),
        defaults={"tile": TILE_TOKENS},
        refine=True,
    )


# The planners that serve. The lab has more, for comparison.
SERVING_PLANNERS: Mapping[str, Planner] = {
    "plain": Planner(_plain),
    "aot": Planner(
        _aot,
        ("ctas", "tasks", "min", "tile"),
        defaults={"tasks": 1, "min": MIN_TOKENS, "tile": TILE_TOKENS},
    ),
    "workqueue": Planner(
        _workqueue, ("ctas", "tasks", "min", "tile"), defaults={"tile": TILE_TOKENS}, refine=True
    ),
    "packing": packing_planner(PACKING_RULES),
}


@dataclass(frozen=True)
class Schedule:
    """How to plan and run a decode step, parsed from its written form (see the module)."""

    text: str
    name: str
    planner: Planner
    rule: str
    one_tile: bool
    numbers: Mapping[str, int]

    @classmethod
    def parse(cls, text: str, planners: Mapping[str, Planner] = SERVING_PLANNERS) -> Schedule:
        """Parse a schedule. Raises `ConfigError` naming the part that `planners` do not know."""
        head, *extras = text.split("+")
        name, _, rule = head.partition(":")
        if name not in planners:
            raise ConfigError(f"planner is {name!r}, known are {', '.join(planners)}")
        planner = planners[name]
        if rule not in planner.rules:
            known_rules = ", ".join(known or "none" for known in planner.rules)
            raise ConfigError(f"rule of {text!r} is {rule!r}, known are {known_rules}")
        one_tile, numbers, known = False, {}, (*planner.numbers, *TILE_NUMBERS)
        for extra in extras:
            option, equals, value = extra.partition("=")
            if option not in (known if equals else (ONE_TILE,)) or (
                equals and not value.isdecimal()
            ):
                listed = ", ".join([ONE_TILE, *(f"{number}=N" for number in known)])
                raise ConfigError(
                    f"option {extra!r} of {text!r} is not known: {name} knows {listed}"
                )
            if equals:
                numbers[option] = int(value)
            else:
                one_tile = True
        return cls(text, name, planner, rule, one_tile, numbers)

    @property
    def kind(self) -> str:
        """The planner and its rule, without numbers and `onetile`."""
        return f"{self.name}:{self.rule}" if self.rule else self.name

    def plan(
        self, batch: Decoding, multiprocessors: int, cost: CostModel, programs: int = CTAS
    ) -> WorkPlan:
        """Make a plan on the host for so many `programs` on each multiprocessor, or `ctas` of them.

        Raises `ConfigError` naming the argument that is out of range.
        """
        workers = multiprocessors * self.numbers.get("ctas", programs)
        taken = {**self.planner.defaults, **self.numbers}
        numbers = {ARGUMENTS[name]: value for name, value in taken.items() if name in ARGUMENTS}
        if self.planner.refine:
            numbers["finer"] = not self.numbers.keys() & {"ctas", "tasks"}
        return self.planner.make(batch, workers, cost, self.rule, **numbers)
