"""A schedule by name: a planner, its rule, how finely it cuts, and what the kernels are told.

    plain | aot | workqueue | uniform | packing:{off,naive,paper,measured,thrifty} | buckets:{exact,padded}

followed by any of `+ctas=3 +tasks=4 +min=256 +tile=128 +queries=128` (planner) and `+apart +atomic +serial +onetile
+replan +entries=64 +stages=3 +warps=4` (execution; entries, stages and warps apply to every tile). `ctas` is how many
programs a multiprocessor runs at once, `replan` plans every layer by itself at every step. Partial results are merged
by a kernel of their own with `apart`, by whichever task comes last with `atomic`: `packing:paper+queries=128+ctas=2`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

from tangram.errors import ConfigError
from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.packing import plan_packing
from tangram.plan.plain import plan_plain
from tangram.plan.profit import PackingRule
from tangram.plan.uniform import plan_buckets, plan_uniform_splits
from tangram.plan.workqueue import plan_workqueue
from tangram.types import Int32, Int64

# The numbers that each planner takes, and their names there.
PLANNERS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "aot": ("ctas", "tasks", "min", "tile"),
    "workqueue": ("ctas", "tasks", "min", "tile"),
    "uniform": ("ctas", "tile"),
    "packing": ("ctas", "tasks", "min", "tile", "queries"),
    "buckets": ("ctas", "tile"),
}
ARGUMENTS = {"tasks": "tasks_per_worker", "min": "min_tokens", "tile": "tile_tokens", "queries": "max_query_rows"}
RULES: dict[str, tuple[str, ...]] = {"packing": get_args(PackingRule), "buckets": ("exact", "padded")}
FLAGS = ("apart", "atomic", "serial", "onetile", "replan")
TILE_NUMBERS = ("entries", "stages", "warps")
CTAS = 3  # what an H100 was fastest with; `tangram bench calibrate-policy` tries others
TILE_TOKENS = 64
MIN_TOKENS = 128


@dataclass(frozen=True, eq=False)
class Decoding:
    """A batch that decodes, as planners are told of it.

    `lengths` is the flat int32 array, `group` is G, `kept_tokens` [R, L, H] what each head keeps of a sealed chunk.
    `prefixes` builds the prefix forest.
    """

    rows: DecodeRows
    lengths: Int32
    group: int
    kept_tokens: Int64
    prefixes: Callable[[], Forest]

    @cached_property
    def forest(self) -> Forest:
        """The prefix forest, built when something first asks for it."""
        return self.prefixes()

    def layers(self) -> list[Decoding]:
        """The same batch seen by each layer alone."""
        return [
            Decoding(self.rows.layer(i), self.lengths, self.group, self.kept_tokens[:, i : i + 1], self.prefixes)
            for i in range(self.rows.table.shape[1])
        ]


@dataclass(frozen=True)
class Schedule:
    """How to plan and run a decode step, parsed from its written form (see the module)."""

    text: str
    planner: str
    rule: str
    flags: frozenset[str]
    numbers: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Raises `ConfigError` naming the part that is not known."""
        head, *extras = text.split("+")
        planner, _, rule = head.partition(":")
        if planner not in PLANNERS:
            raise ConfigError(f"planner is {planner!r}, known are {', '.join(PLANNERS)}")
        if rule not in RULES.get(planner, ("",)):
            raise ConfigError(f"rule of {text!r} is {rule!r}, known are {', '.join(RULES.get(planner, ('none',)))}")
        flags, numbers, known = set(), {}, (*PLANNERS[planner], *TILE_NUMBERS)
        for extra in extras:
            name, equals, value = extra.partition("=")
            if name not in (known if equals else FLAGS) or (equals and not value.isdecimal()):
                listed = ", ".join([*FLAGS, *(f"{number}=N" for number in known)])
                raise ConfigError(f"option {extra!r} of {text!r} is not known: {planner} knows {listed}")
            if equals:
                numbers[name] = int(value)
            else:
                flags.add(name)
        return cls(text, planner, rule, frozenset(flags), numbers)

    @property
    def kind(self) -> str:
        """The planner and its rule, without numbers and flags."""
        return f"{self.planner}:{self.rule}" if self.rule else self.planner

    @property
    def each_step(self) -> bool:
        """Whether the plan must be made again at every step."""
        return self.planner in ("uniform", "buckets") or "replan" in self.flags

    def plan(self, batch: Decoding, multiprocessors: int, cost: CostModel) -> WorkPlan:
        """The host work of making a plan. Raises `ConfigError` naming the argument that is out of range."""
        workers = multiprocessors * self.numbers.get("ctas", CTAS)
        return self._planner(batch, workers, cost)(**self._arguments())

    def _planner(self, batch: Decoding, workers: int, cost: CostModel) -> Callable[..., WorkPlan]:
        rows, lengths = batch.rows, batch.lengths
        rule: Any = self.rule
        match self.planner:
            case "plain":
                return partial(plan_plain, rows)
            case "aot":
                return partial(plan_aot, rows, workers)
            case "workqueue":
                return partial(plan_workqueue, rows, lengths, workers)
            case "uniform":
                return partial(plan_uniform_splits, rows, lengths, workers)
            case "buckets":
                return partial(plan_buckets, rows, lengths, workers, kind=rule)
        return partial(
            plan_packing, rows, lengths, batch.forest, batch.kept_tokens, workers, group=batch.group, cost=cost,
            rule=rule,
        )  # fmt: skip

    def _arguments(self) -> dict[str, int]:
        defaults = {"tile": TILE_TOKENS} | ({"tasks": 1, "min": MIN_TOKENS} if self.planner == "aot" else {})
        taken = {name: value for name, value in (defaults | self.numbers).items() if name in PLANNERS[self.planner]}
        return {ARGUMENTS[name]: value for name, value in taken.items() if name in ARGUMENTS}
