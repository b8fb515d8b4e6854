"""Attention on a CPU by compiled code (`compiled_attention.py`).

Prefill is the reference's where the processor lacks the instructions, and where latents expand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.cpu import compiled_attention
from tangram.kernels.cpu.compiled_attention import CpuPlan, DecodePass
from tangram.kernels.cpu.waiting import WaitPolicy
from tangram.kernels.interface import AttentionRule, DecodedRows, KvPool, PassAddresses
from tangram.kernels.reference_kernels import ReferenceKernels, ReferenceLaunch
from tangram.plan.records import as_words
from tangram.plan.schedule import Schedule


class CpuKernels(ReferenceKernels):
    """`PoolKernels` of a pool that `compiled_attention.runs_compiled`."""

    def __init__(self, pool: KvPool, schedule: Schedule | None = None) -> None:
        super().__init__(pool, schedule)
        self._waiting = WaitPolicy()
        self._plans: dict[int, CpuPlan] = {}  # the last, by queries of a row
        compiled_attention.warm_up(pool.entries.dtype)

    def launch(self, addresses: PassAddresses, tables: Tensor) -> CpuLaunch:
        """See `PoolKernels`. No pass is padded."""
        self._waiting.adjust()
        rows, decoding = addresses.decode, None
        if rows is not None:
            plan = self._plans.get(rows.queries)
            if plan is None or plan.plan is not rows.plan:
                plan = self._plans[rows.queries] = CpuPlan.build(rows.plan, rows.address)
            first = np.append(0, np.cumsum(rows.counts, dtype=np.int64))
            lengths = torch.from_numpy(addresses.lengths).view(-1)
            decoding = DecodePass(self.pool.entries, tables, lengths, first, plan)
        return CpuLaunch(self.pool, addresses, tables, decoding)


@dataclass(frozen=True, eq=False)
class CpuLaunch(ReferenceLaunch):
    """`ReferenceLaunch` whose decode rows are those of `decoding`."""

    decoding: DecodePass | None

    def _run_plan(self, rows: DecodedRows, layer: int, rule: AttentionRule, *x: Tensor) -> None:
        q, k, v, out = x
        if self.decoding is not None:
            self.decoding.run(q, k, v, out, layer, rule)

    def _attend(self, layer: int, rule: AttentionRule, *x: Tensor) -> None:
        q, k, v, out = x
        known, pool = self.addresses.prefill, self.pool.entries
        if not compiled_attention.prefills_compiled(q, pool):
            super()._attend(layer, rule, *x)
            return
        address, spans = known.address[layer, known.asking], known.spans[known.asking]
        places = pool, self.tables, as_words(address), as_words(spans)
        compiled_attention.prefill(q, k, v, out, *places, rule)
