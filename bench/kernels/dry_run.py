"""Tiny versions of a family's cases on the CPU, without a GPU.

Each planner's plan passes `check`, also after rows have grown. The torch reference executes it, as
do the kernels if Triton's interpreter is on (TRITON_INTERPRET=1). All must give the answer of plain
attention.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from bench.kernels.family import Entry, make_case
from tangram.kernels import reference
from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton.card import INTERPRETED
from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram_lab.baselines.compared_schedules import KernelVariant
from tangram_lab.kernel_benchmarks.contenders import Ours
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tangram_lab.kernel_benchmarks.timing import LARGEST_ERROR, WrongAnswer, relative_error
from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected

MULTIPROCESSORS = 3


def dry_run(name: str, options: argparse.Namespace, entries: Iterable[Entry]) -> None:
    """Check every case with every requested planner.

    Raises `WrongAnswer` or `IntegrityError` at the first fault.
    """
    cost = CostModel(**json.loads(options.cost.read_text())) if options.cost else CostModel()
    interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    count = 0
    for entry in entries:
        workload = Workload.build(
            make_case(entry, options, tiny=True), getattr(torch, options.dtype), torch.device("cpu")
        )
        answer = compute_expected(workload)
        for variant in map(KernelVariant.parse, entry.only or options.planners):
            where = f"{entry.name}, {variant.text}"
            plan = variant.schedule.plan(workload.case.decoding, MULTIPROCESSORS, cost)
            check_plan(plan, workload.case.rows, workload.case.lengths, workload.case.tables)
            _compare(f"{where}, reference", _by_reference(workload, plan), answer)
            if interpreter:
                _compare(f"{where}, kernels", _by_kernels(variant, workload, cost), answer)
            count += 1
    print(
        f"{name}: {count} plans checked on the CPU, kernels "
        f"{'interpreted' if interpreter else 'not run'}"
    )


def _by_reference(workload: Workload, plan: WorkPlan) -> list[Tensor]:
    attend: Callable[..., Tensor] = reference.decode
    return [
        attend(
            q,
            workload.pool,
            workload.tables,
            workload.lengths,
            plan,
            layer,
            AttentionRule(workload.scaling),
        )
        for layer, q in enumerate(workload.q)
    ]


def _by_kernels(variant: KernelVariant, workload: Workload, cost: CostModel) -> list[Tensor]:
    contender = Ours(variant, workload, replace(INTERPRETED, processors=MULTIPROCESSORS), cost)
    contender.plan()
    return contender.run()


def _compare(where: str, outputs: list[Tensor], answer: list[Tensor]) -> None:
    error = max(relative_error(out, ref) for out, ref in zip(outputs, answer, strict=True))
    if not error < LARGEST_ERROR:
        raise WrongAnswer(
            f"{where}: relative error {error:.3g}, at most {LARGEST_ERROR} is allowed"
        )
