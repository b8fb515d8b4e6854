"""How decode is planned: the batch as planners see it, a planner, and how finely it cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.packing import MAX_QUERY_ROWS, plan_packing
from tangram.plan.profit import PackingRule, pack_thrifty
from tangram.plan.workqueue import Grain
from tangram.types import Int32, Int64

CTAS = 3  # fastest on an H100


@dataclass(frozen=True, eq=False)
class Decoding:
    """A batch that decodes, as planners see it.

    `lengths` is the flat int32 array, `group` is G, and `kept_tokens` [R, L, H] is what each head
    keeps of a sealed chunk. `prefixes` builds the prefix forest. A row has up to `queries` tokens,
    its newest and drafts.
    """

    rows: DecodeRows
    lengths: Int32
    group: int
    kept_tokens: Int32 | Int64
    prefixes: Callable[[], Forest]
    queries: int = 1

    @cached_property
    def forest(self) -> Forest:
        """The prefix forest, built at first use."""
        return self.prefixes()


def plan_by_budgets(batch: Decoding, workers: int, cost: CostModel, **numbers: int) -> WorkPlan:
    """`plan_aot` of a batch."""
    return plan_aot(batch.rows, workers, **numbers)


def plan_shared(
    batch: Decoding,
    workers: int,
    cost: CostModel,
    *,
    rule: PackingRule = pack_thrifty,
    max_query_rows: int = MAX_QUERY_ROWS,
    **numbers: Any,
) -> WorkPlan:
    """`plan_packing` of a batch; `numbers` are those of a `Grain`."""
    group = batch.group * batch.queries
    return plan_packing(
        batch.rows,
        batch.lengths,
        batch.forest,
        batch.kept_tokens,
        Grain(workers, **numbers),
        group=group,
        cost=cost,
        rule=rule,
        max_query_rows=max(group, max_query_rows),
    )


@dataclass(frozen=True)
class Schedule:
    """How to plan a decode step: `make` takes the batch, the workers, costs and the `numbers`.

    `kind` is the planner's name. A multiprocessor has `ctas` workers, where that is given.
    """

    kind: str
    make: Callable[..., WorkPlan]
    numbers: Mapping[str, int] = field(default_factory=dict)
    ctas: int | None = None

    def plan(
        self, batch: Decoding, multiprocessors: int, cost: CostModel, programs: int = CTAS
    ) -> WorkPlan:
        """Make a plan on the host for so many `programs` on each multiprocessor, or `ctas` of them.

        Raises `ConfigError` naming the argument that is out of range.
        """
        workers = multiprocessors * (programs if self.ctas is None else self.ctas)
        return self.make(batch, workers, cost, **self.numbers)
