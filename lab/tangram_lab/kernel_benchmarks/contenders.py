"""Tangram's kernels with any schedule, as contenders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.card_cost import count_programs
from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding
from tangram_lab.baselines.compared_schedules import KernelVariant
from tangram_lab.kernel_benchmarks.counters import WorkCounters
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tangram_lab.kernel_benchmarks.workloads import Workload

if TYPE_CHECKING:
    from tangram.kernels.triton.decode_launch import GpuDecode


class Ours:
    """Plans by the schedule of a variant and runs Tangram's kernels over the workload's pool.

    Every first plan passes `check`. A schedule that plans each layer anew has a plan, and buffers,
    for each layer.
    """

    replans = True

    def __init__(
        self, variant: KernelVariant, workload: Workload, card: Card, cost: CostModel
    ) -> None:
        self.name, self.each_step = variant.text, variant.each_step
        self._variant, self._workload, self._cost = variant, workload, cost
        self._card = card
        self._programs = count_programs(workload.pool, workload.case.geometry.group, card)
        plans, batches = self._plan(), self._batches()
        for plan, batch in zip(plans, batches, strict=True):
            check_plan(plan, batch.rows, batch.lengths, workload.case.tables)
        self.counters = WorkCounters.of(plans, workload.case, card.processors, variant.options())
        self._decoders = [self._decoder(plan) for plan in plans]
        layers = [range(batch.rows.table.shape[1]) for batch in batches]
        self._places = [
            (d, layer) for d, own in zip(self._decoders, layers, strict=True) for layer in own
        ]

    def _batches(self) -> list[Decoding]:
        """New rows at every plan, since planning includes what a batch derives from itself."""
        batch = self._workload.case.decoding
        if not self._variant.replans:
            return [batch]
        return [
            replace(
                batch,
                rows=batch.rows.layer(layer),
                kept_tokens=batch.kept_tokens[:, layer : layer + 1],
            )
            for layer in range(batch.rows.shape[1])
        ]

    def _plan(self) -> list[WorkPlan]:
        return [
            self._variant.schedule.plan(batch, self._card.processors, self._cost, self._programs)
            for batch in self._batches()
        ]

    def _decoder(self, plan: WorkPlan) -> GpuDecode:
        from tangram.kernels.triton.decode_launch import GpuDecode
        from tangram.kernels.triton.stored import StoredPool

        case = self._workload.case
        return GpuDecode(
            plan,
            StoredPool.of(self._workload.pool, self._scales()),
            case.geometry.group,
            lengths=case.lengths,
            options=self._variant.options(),
        )

    def _scales(self) -> Tensor | None:
        """Of an FP8 pool: 1 for all keys and values, as its entries were drawn."""
        _, layers, heads = self._workload.case.shape
        if self._workload.case.geometry.element_bytes == 2:
            return None
        return torch.ones(layers, heads, 2, device=self._workload.device)

    def plan(self) -> None:
        """Make the plan from tables and lengths, and upload it."""
        for decoder, plan in zip(self._decoders, self._plan(), strict=True):
            decoder.load(plan, self._workload.case.lengths)

    def run(self) -> list[Tensor]:
        """All layers, one after the other as a model runs them."""
        work, rule = self._workload, AttentionRule(self._workload.scaling)
        return [
            decoder.attend(layer, q, work.tables, work.lengths, rule)
            for (decoder, layer), q in zip(self._places, work.q, strict=True)
        ]
