"""The work of a plan on the device, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.kernels.triton.packed import Capacity, DecodeOptions, pack
from tangram.plan.form import WorkPlan
from tangram_lab.kernel_benchmarks.case import Case


@dataclass(frozen=True)
class WorkCounters:
    """Launches, tasks that read an entry, partial results, and the KV bytes that tasks read."""

    launches: int
    tasks: int
    partials: int
    tasks_per_multiprocessor: float
    task_kv_bytes: int
    merged_bytes: int

    @classmethod
    def of(
        cls,
        plans: Sequence[WorkPlan],
        case: Case,
        multiprocessors: int,
        options: DecodeOptions | None = None,
    ) -> WorkCounters:
        """Of all layers together, as kernels with `options` run `plans`. Partial results count
        their float32 output and log-sum-exp, written and read.
        """
        launches = sum(
            count_launches(plan, case, options or DecodeOptions()) * plan.layers for plan in plans
        )
        tokens = np.concatenate([np.subtract(*plan.spans(case.lengths)[::-1]) for plan in plans])
        partials = sum(int((~plan.direct).sum()) for plan in plans)
        merged = partials * case.geometry.group * (case.geometry.head_dim + 1) * 4 * 2
        tasks, read = int((tokens > 0).sum()), int(tokens.sum()) * case.entry_bytes
        return cls(launches, tasks, partials, tasks / multiprocessors, read, merged)


def count_launches(plan: WorkPlan, case: Case, options: DecodeOptions) -> int:
    """Launches of each layer: one for a kind of task that some layer has, one for a merge."""
    packed = pack(plan, case.geometry.group, options, case.lengths)
    capacity = Capacity.of(plan, packed)
    return sum(count > 0 for count in capacity.tasks) + (capacity.segments > 0)
