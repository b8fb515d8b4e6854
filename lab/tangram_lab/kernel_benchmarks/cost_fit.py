"""The constants of the cost model, measured on this GPU.

Each comes from two batches that differ in one quantity only. Their common costs (the launch, the
merge) cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tangram.kernels.card import Card
from tangram.plan.cost import CostModel
from tangram.plan.schedule import CTAS
from tangram_lab.baselines.compared_schedules import KernelVariant
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case, tree_case
from tangram_lab.kernel_benchmarks.contenders import Ours
from tangram_lab.kernel_benchmarks.counters import WorkCounters
from tangram_lab.kernel_benchmarks.timing import ColdCache, measure
from tangram_lab.kernel_benchmarks.tree import Tree
from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected

LEAST_US = 1e-3  # used where the difference is below the noise
Run = Callable[[Case, str], tuple[float, WorkCounters]]


def measure_cost(geometry: BatchGeometry, dtype: torch.dtype, device: torch.device) -> CostModel:
    """The model of this device for one geometry and dtype; mostly compiles, for some seconds."""
    card = Card.of(device)
    start = CostModel(
        workers=card.processors * CTAS, head_dim=geometry.head_dim, element_bytes=dtype.itemsize
    )
    cold = ColdCache(device)

    def run(case: Case, text: str) -> tuple[float, WorkCounters]:
        workload = Workload.build(case, dtype, device)
        ours = Ours(KernelVariant.parse(text), workload, card, start)
        return measure(ours, compute_expected(workload), cold, wall=False).median_us, ours.counters

    bytes_per_us = _bytes_per_us(run, geometry)
    return replace(
        start,
        bytes_per_us=bytes_per_us,
        task_us=_task_us(run, geometry, bytes_per_us) * start.workers,
        partial_bytes_per_us=_partial_bytes_per_us(run, geometry),
        flops_per_us=_flops_per_us(run, geometry),
    )


def _bytes_per_us(run: Run, geometry: BatchGeometry) -> float:
    """64 rows of 4,096 entries, and of twice as many."""
    (short_us, short), (long_us, long) = (
        run(own_case("bytes", [tokens] * 64, geometry, 0), "workqueue") for tokens in (4096, 8192)
    )
    return (long.task_kv_bytes - short.task_kv_bytes) / max(long_us - short_us, LEAST_US)


def _task_us(run: Run, geometry: BatchGeometry, bytes_per_us: float) -> float:
    """1,024 rows of one page each, and twice as many: the time of a task without its bytes."""
    (few_us, few), (many_us, many) = (
        run(own_case("starts", [geometry.page_tokens] * rows, geometry, 0), "plain")
        for rows in (1024, 2048)
    )
    reading_us = (many.task_kv_bytes - few.task_kv_bytes) / bytes_per_us
    return max(many_us - few_us - reading_us, LEAST_US) / (many.tasks - few.tasks)


def _partial_bytes_per_us(run: Run, geometry: BatchGeometry) -> float:
    """256 rows of 1,024 entries in four parts each, and in eight."""
    (few_us, few), (many_us, many) = (
        run(own_case("partials", [1024] * 256, geometry, 0), f"workqueue+tasks=128+min={tokens}")
        for tokens in (256, 128)
    )
    return (many.merged_bytes - few.merged_bytes) / max(many_us - few_us, LEAST_US)


def _flops_per_us(run: Run, geometry: BatchGeometry) -> float:
    """1,024 rows with four pages of their own that share 4,096 entries, and twice as many."""
    short_us, long_us = (
        run(
            tree_case(Tree((1, 1024), (tokens, 4 * geometry.page_tokens)), geometry, 0),
            "packing:naive+queries=128",
        )[0]
        for tokens in (4096, 8192)
    )
    return (
        4
        * geometry.head_dim
        * geometry.query_heads
        * 1024
        * 4096
        / max(long_us - short_us, LEAST_US)
    )
