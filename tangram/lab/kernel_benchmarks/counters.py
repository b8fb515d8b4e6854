"""The work of a plan on the device, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.lab.kernel_benchmarks.case import Case
from tangram.plan.form import WorkPlan


@dataclass(frozen=True)
class WorkCounters:
    """Tasks that read an entry, partial results, and the KV bytes that tasks read."""

    tasks: int
    partials: int
    tasks_per_multiprocessor: float
    task_kv_bytes: int
    merged_bytes: int

    @classmethod
    def of(cls, plans: Sequence[WorkPlan], case: Case, multiprocessors: int) -> WorkCounters:
        """Of all layers together. Partial results count their float32 output and log-sum-exp,
        written and read.
        """
        tokens = np.concatenate([np.subtract(*plan.spans(case.lengths)[::-1]) for plan in plans])
        partials = sum(int((~plan.direct).sum()) for plan in plans)
        merged = partials * case.geometry.group * (case.geometry.head_dim + 1) * 4 * 2
        tasks, read = int((tokens > 0).sum()), int(tokens.sum()) * case.entry_bytes
        return cls(tasks, partials, tasks / multiprocessors, read, merged)
