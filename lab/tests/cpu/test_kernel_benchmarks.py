"""The kernel benchmarks run: tiny cases on the CPU, and one clear line where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bench.kernels import (
    ablations,
    cutting,
    dense,
    family,
    latents,
    living,
    pat,
    persistent,
    ragged,
)
from tangram.kernels import reference
from tangram.kernels.interface import AttentionRule
from tangram.plan.form import WorkPlan
from tangram.plan.split import plan_plain
from tangram_lab.kernel_benchmarks import workloads
from tangram_lab.kernel_benchmarks.case import BatchGeometry, own_case, tree_case
from tangram_lab.kernel_benchmarks.tree import Tree
from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected

Main = Callable[[Sequence[str]], None]
FAMILIES: dict[str, tuple[Main, list[str]]] = {
    "dense": (dense.main, ["--planners", "aot,workqueue"]),
    "pat": (pat.main, ["--heads", "8/2", "--configs", "1,10_4096,416", "2,8,16,256_256,256,32,32"]),
    "persistent": (persistent.main, ["--quick", "--seeds", "0"]),
    "living": (living.main, ["--quick", "--seeds", "0", "--snapshots", "2"]),
    "ragged": (
        ragged.main,
        ["--quick", "--contexts", "8192", "--batches", "2", "--planners", "aot,uniform"],
    ),
    "ablations": (ablations.main, ["--heads", "8/2"]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_cases_give_the_plain_answer(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run, options = FAMILIES[name]
    run([*options, "--dry-run"])
    assert f"{name}: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("entries", [[], ["--fp8", "--dtype", "bfloat16"]], ids=["plain", "fp8"])
def test_a_dry_run_takes_the_kernels_along_where_they_can_be_interpreted(
    entries: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = ["--heads", "8/2", "--configs", "1,10_4096,416", "--planners", "packing:naive"]
    pat.main([*tree, *entries, "--dry-run"])
    assert "kernels interpreted" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_long_rows_are_cut_finer_and_give_the_same_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cutting.main(["--small"])
    assert "{'workqueue': 24, 'workqueue+ctas=3': 9}" in capsys.readouterr().out


def test_a_plan_that_skips_entries_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        q: torch.Tensor,
        pool: torch.Tensor,
        tables: Any,
        lengths: torch.Tensor,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        return honest(q, pool, tables, lengths - 1, *rest, **kw)

    honest = reference.decode
    monkeypatch.setattr(reference, "decode", forgetful)
    with pytest.raises(Exception, match="relative error"):
        dense.main(["--planners", "aot", "--dry-run"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_benchmark_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pat.main([])
    assert stop.value.code == 2
    assert capsys.readouterr().err == family.NO_DEVICE + "\n"


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 30])
def test_the_benchmarks_answer_is_the_specifications(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "REFERENCE_BYTES", chunk_bytes)
    geometry = BatchGeometry(kv_heads=2, group=2, head_dim=16, page_tokens=4, heads_per_page=1)
    for case in (
        own_case("", [3, 50, 1, 17], geometry, 0),
        tree_case(Tree((1, 3), (8, 4)), geometry, 0),
    ):
        workload = Workload.build(case, torch.float32, torch.device("cpu"))
        plan: WorkPlan = plan_plain(case.rows)
        out = reference.decode(
            workload.q[0],
            workload.pool,
            workload.tables,
            workload.lengths,
            plan,
            0,
            AttentionRule(workload.scaling),
        )
        np.testing.assert_allclose(
            compute_expected(workload)[0].numpy(), out.numpy(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_latents_are_attended_as_in_full_precision(capsys: pytest.CaptureFixture[str]) -> None:
    latents.main(["--small"])
    assert capsys.readouterr().out.count("relative error") == 8
