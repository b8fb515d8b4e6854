"""Calibrating and judging a policy, with a clock that is told what to say: no device is needed for
the bookkeeping.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tangram.cli import app
from tangram.plan.cost import CostModel
from tangram.plan.policy import FLASHINFER, Policy
from tangram_lab.kernel_benchmarks import cases, policy_calibration
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case
from tangram_lab.kernel_benchmarks.cases import NamedCase
from tangram_lab.kernel_benchmarks.policy_calibration import (
    best_single,
    calibrate_policy,
    judge,
    regret,
)
from tangram_lab.kernel_benchmarks.timing import Measurement
from tangram_lab.kernel_benchmarks.traces import Trace
from tangram_lab.kernel_benchmarks.tree import Tree

GEOMETRY = BatchGeometry(kv_heads=2, group=2, head_dim=16, page_tokens=16, heads_per_page=2)
CPU = torch.device("cpu")
SCHEDULES = ("workqueue", "packing:thrifty")


def tell_time(name: str, case: Case) -> float:
    """Packing is twice as fast where prefixes are shared, half as fast elsewhere;
    FlashInfer never.
    """
    shared = case.tree is not None and case.tree.shared
    if name == FLASHINFER:
        return 105.0
    return (50.0 if shared else 200.0) if name.startswith("packing") else 100.0


class Told:
    """A contender that is never run."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case


def told_measure(contender: Told, *rest: Any, **options: Any) -> Measurement:
    us = tell_time(contender.name, contender.case)
    library = contender.name == FLASHINFER
    return Measurement(
        contender.name, us, us, us, [us], True, library, 0.0, True, 20.0, us + 5, us + 2
    )


@pytest.fixture(autouse=True)
def told_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_calibration, "measure", told_measure)
    monkeypatch.setattr(policy_calibration, "compute_expected", lambda workload: [])
    monkeypatch.setattr(policy_calibration, "ColdCache", lambda device: None)
    monkeypatch.setattr(policy_calibration, "measure_cost", lambda *rest: CostModel(task_us=0.25))
    monkeypatch.setattr(
        policy_calibration,
        "Ours",
        lambda schedule, workload, *rest: Told(schedule.text, workload.case),
    )
    monkeypatch.setattr(
        policy_calibration, "Library", lambda workload, *rest: Told(FLASHINFER, workload.case)
    )
    monkeypatch.setattr(policy_calibration.flashinfer, "is_installed", lambda: True)
    monkeypatch.setattr(policy_calibration.flashinfer, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(policy_calibration.Card, "of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    # A 256th of the real lengths: the cases are built, so that their loads are real.
    monkeypatch.setattr(
        Trace, "lengths", lambda trace, seed: [trace.bucket // 256 + seed % 7] * min(trace.batch, 4)
    )


def unique_tokens(case: NamedCase) -> int:
    tree = Tree.parse(case.name)
    return sum(nodes * tokens for nodes, tokens in zip(tree.nodes, tree.tokens, strict=True))


def small(cases: Sequence[NamedCase]) -> list[NamedCase]:
    """A few rows without prefixes, and the smallest trees."""
    trees = [case for case in cases if case.family == "shared prefixes"]
    own = [case for case in cases if "tree" not in case.family and case not in trees]
    return own[::4] + sorted(trees, key=unique_tokens)[:3]


def test_a_policy_takes_what_the_clock_says_is_fastest_and_is_judged_by_it() -> None:
    policy = calibrate_policy(
        GEOMETRY, torch.float16, CPU, small(cases.calibration(GEOMETRY)), SCHEDULES
    )
    assert policy.schedules == (*SCHEDULES, FLASHINFER)
    assert policy.device == "a GPU" and policy.cost.task_us == 0.25
    assert policy.geometry == {
        "kv_heads": 2,
        "group": 2,
        "head_dim": 16,
        "page_tokens": 16,
        "heads_per_page": 2,
        "dtype": "float16",
    }
    verdicts = judge(
        policy, torch.float16, GEOMETRY, CPU, small(cases.make_held_out_cases(GEOMETRY))
    )
    chosen = {verdict.family: verdict.chosen for verdict in verdicts}
    assert chosen["shared prefixes"] == "packing:thrifty" and chosen["ragged"] == "workqueue"
    single = best_single(verdicts)
    assert single == "workqueue"
    assert max(regret(verdict, single) for verdict in verdicts) == 0.0
    assert min(regret(verdict, single) for verdict in verdicts) == -0.5


def test_planning_at_every_step_counts() -> None:
    measured = told_measure(Told(FLASHINFER, cases.make_held_out_cases(GEOMETRY)[0].make()))
    assert policy_calibration.step_us(measured) == 125.0
    assert policy_calibration.step_us(replace(measured, each_step=False)) == 105.0


def test_the_command_judges_a_policy_and_keeps_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = calibrate_policy(
        GEOMETRY, torch.float16, CPU, small(cases.calibration(GEOMETRY)), SCHEDULES
    )
    policy.save(tmp_path / "policy.json")
    monkeypatch.setattr("tangram_lab.cli.bench._gpu", lambda: CPU)
    held_out = small(cases.make_held_out_cases(GEOMETRY))
    monkeypatch.setattr(cases, "make_held_out_cases", lambda geometry: held_out)
    kept = tmp_path / "kernels_policy.json"
    result = CliRunner().invoke(
        app, ["bench", "check-policy", str(tmp_path / "policy.json"), "-o", str(kept)]
    )
    assert result.exit_code == 0, result.output
    assert "best single schedule" in result.output
    found = json.loads(kept.read_text())
    assert found["command"] == "tangram bench check-policy policy.json"
    assert len(found["verdicts"]) == len(held_out) and set(found["verdicts"][0]["step_us"]) == set(
        policy.schedules
    )
    assert found["worst_regret"] <= 0.0


def test_the_command_keeps_a_policy_where_an_engine_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    monkeypatch.setattr("tangram_lab.cli.bench._gpu", lambda: CPU)
    few = small(cases.calibration(GEOMETRY))
    monkeypatch.setattr(cases, "calibration", lambda geometry: few)
    result = CliRunner().invoke(
        app,
        ["bench", "calibrate-policy", "--heads", "4/2", "--head-dim", "16", "--dtype", "float16"],
    )
    assert result.exit_code == 0, result.output
    assert Policy.load(tmp_path / "policies" / "a_GPU_4-2x16_float16.json").device == "a GPU"
