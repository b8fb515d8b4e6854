"""Our kernels under any of our planners, as contenders."""

from __future__ import annotations

from torch import Tensor

from bench.kernels.planners import Counters, Variant
from bench.kernels.workloads import Workload
from tangram.plan.cost import CostModel


class Ours:
    """Plans with a variant and runs our kernels over the workload's pool. The first plan passes `check`."""

    def __init__(self, variant: Variant, workload: Workload, workers: int, cost: CostModel) -> None:
        from tangram.kernels.gpu import GpuDecode

        case = workload.case
        self.name, self.each_step = variant.text, variant.each_step
        self._workload, self._planner = workload, variant.planner_of(case, workers, cost)
        first = self._planner()
        first.check(case.rows, case.lengths, case.tables)
        self.counters = Counters.of(first, case, workers)
        self._decoder = GpuDecode(
            [first], group=case.geometry.group, head_dim=case.geometry.head_dim,
            pool=workload.pool, lengths=case.lengths, options=variant.options(),
        )  # fmt: skip

    def plan(self) -> None:
        """Make the plan from tables and lengths, and upload it."""
        self._decoder.load(self._planner(), self._workload.case.lengths)

    def run(self) -> list[Tensor]:
        """All layers, one after the other as a model runs them."""
        work = self._workload
        return [
            self._decoder.attend(layer, q, work.tables, work.lengths, scaling=work.scaling)
            for layer, q in enumerate(work.q)
        ]
