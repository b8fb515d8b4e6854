"""Our kernels under any schedule, as contenders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding, Schedule
from tangram.tune.counters import Counters
from tangram.tune.workloads import Workload

if TYPE_CHECKING:
    from tangram.kernels.gpu import GpuDecode


class Ours:
    """Plans by a schedule and runs our kernels over the workload's pool. Every first plan passes `check`.

    A schedule that re-plans layer by layer has a plan, and buffers, for each layer.
    """

    def __init__(self, schedule: Schedule, workload: Workload, multiprocessors: int, cost: CostModel) -> None:
        self.name, self.each_step = schedule.text, schedule.each_step
        self._schedule, self._workload, self._cost = schedule, workload, cost
        self._multiprocessors, batch = multiprocessors, workload.case.decoding
        self._batches = batch.layers() if "replan" in schedule.flags else [batch]
        plans = [self._planned(batch) for batch in self._batches]
        for plan, decoding in zip(plans, self._batches, strict=True):
            plan.check(decoding.rows, decoding.lengths, workload.case.tables)
        self.counters = Counters.of(plans, workload.case, multiprocessors)
        self._decoders = [self._decoder(plan) for plan in plans]

    def _planned(self, batch: Decoding) -> WorkPlan:
        return self._schedule.plan(batch, self._multiprocessors, self._cost)

    def _decoder(self, plan: WorkPlan) -> GpuDecode:
        from tangram.kernels.gpu import GpuDecode
        from tangram.kernels.packed import DecodeOptions

        case = self._workload.case
        return GpuDecode(
            [plan], group=case.geometry.group, head_dim=case.geometry.head_dim, pool=self._workload.pool,
            lengths=case.lengths, options=DecodeOptions.of(self._schedule),
        )  # fmt: skip

    def plan(self) -> None:
        """Make the plan from tables and lengths, and upload it."""
        for batch, decoder in zip(self._batches, self._decoders, strict=True):
            decoder.load(self._planned(batch), batch.lengths)

    def run(self) -> list[Tensor]:
        """All layers, one after the other as a model runs them."""
        work = self._workload
        places = [
            (decoder, layer)
            for decoder, batch in zip(self._decoders, self._batches, strict=True)
            for layer in range(batch.rows.table.shape[1])
        ]
        return [
            decoder.attend(layer, q, work.tables, work.lengths, scaling=work.scaling)
            for (decoder, layer), q in zip(places, work.q, strict=True)
        ]
