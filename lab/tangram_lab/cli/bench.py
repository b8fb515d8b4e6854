"""`tangram bench`: measure this machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from tangram.cli import console
from tangram.cli.command import Command, CommandGroup
from tangram.cli.options import engine_option, number
from tangram.config import cache_folder
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram.plan.policy import FLASHINFER, Policy, policy_name

if TYPE_CHECKING:
    from tangram_lab.kernel_benchmarks.cases import NamedCase
    from tangram_lab.kernel_benchmarks.policy_calibration import Verdict

commands = typer.Typer(cls=CommandGroup, help="Measure this machine.", no_args_is_help=True)


class HalfType(StrEnum):
    """The dtype of the cache."""

    bfloat16 = "bfloat16"
    float16 = "float16"


@commands.command("calibrate-policy", cls=Command)
def calibrate_policy(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="write the policy to this file (JSON)",
            show_default="the cache folder, for this GPU",
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help="query heads / KV heads of a layer")] = "32/8",
    head_dim: Annotated[int, number(Bounds(1, 2**16), "size of a head")] = 128,
    page_tokens: Annotated[int, engine_option("page_tokens")] = 16,
    heads_per_page: Annotated[
        int | None, engine_option("heads_per_page", unset="all of a layer")
    ] = None,
    dtype: Annotated[HalfType, typer.Option(help="dtype of the KV cache")] = HalfType.bfloat16,
) -> None:
    """Time every decode schedule on this GPU, and write a policy that chooses one per step.

    This takes a few minutes.
    """
    import torch

    from tangram_lab.kernel_benchmarks.case import BatchGeometry
    from tangram_lab.kernel_benchmarks.cases import calibration
    from tangram_lab.kernel_benchmarks.policy_calibration import calibrate_policy

    device = _gpu()
    geometry = BatchGeometry.of_heads(heads, page_tokens, heads_per_page, head_dim)
    cases = _make_table(calibration(geometry), "calibrating")
    policy = calibrate_policy(geometry, getattr(torch, dtype.value), device, cases)
    name = policy_name(
        policy.device,
        kv_heads=geometry.kv_heads,
        group=geometry.group,
        head_dim=head_dim,
        dtype=dtype.value,
    )
    path = output or cache_folder() / "policies" / name
    policy.save(path)
    console.tell(
        f"{path}: {len(policy.schedules)} schedules on {len(policy.loads)} traces of "
        f"{policy.device}"
    )


@commands.command("check-policy", cls=Command)
def check_policy(
    policy_file: Annotated[
        Path, typer.Argument(metavar="POLICY", help="file written by calibrate-policy")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write all times to this file (JSON)")
    ] = None,
) -> None:
    """Time the policy's choices on held-out traces.

    They are compared with each single schedule, and with FlashInfer if it is installed.
    """
    import torch

    from tangram_lab.environment import environment
    from tangram_lab.kernel_benchmarks.case import BatchGeometry
    from tangram_lab.kernel_benchmarks.cases import make_held_out_cases
    from tangram_lab.kernel_benchmarks.policy_calibration import best_single, judge, regret

    policy, device = Policy.load(policy_file), _gpu()
    policy.check(torch.cuda.get_device_name(device), {})
    shape = dict(policy.geometry)
    dtype = getattr(torch, shape.pop("dtype"))
    geometry = BatchGeometry(**shape)
    verdicts = judge(
        policy,
        dtype,
        geometry,
        device,
        _make_table(make_held_out_cases(geometry), "held-out traces"),
    )
    single = best_single(verdicts)
    worst = max(verdicts, key=lambda verdict: regret(verdict, single))
    _show(verdicts, single)
    console.output().print(
        f"best single schedule: {single}; the policy at worst {regret(worst, single):+.1%} "
        f"({worst.name})"
    )
    if output is not None:
        content = {
            "command": f"tangram bench check-policy {policy_file.name}",
            "environment": environment(),
            "policy": str(policy_file),
            "geometry": policy.geometry,
            "best_single": single,
            "worst_regret": regret(worst, single),
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        output.write_text(json.dumps(content, indent=1) + "\n")


def _gpu() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cpu: a policy is measured on a CUDA device, and torch finds none"
        )
    return torch.device("cuda")


def _make_table(cases: Sequence[NamedCase], title: str) -> Any:
    return track(cases, description=title, console=console.messages())


def _show(verdicts: Sequence[Verdict], single: str) -> None:
    """Print a row per family: the speed-up over the best single schedule and over FlashInfer."""
    from tangram_lab.kernel_benchmarks.policy_calibration import regret

    table = Table(title="the policy on held-out traces: geometric means")
    for column in ("family", "cases", f"× {single}", "× FlashInfer, device", "wall", "chosen"):
        table.add_column(column)
    for family in dict.fromkeys(verdict.family for verdict in verdicts):
        members = [verdict for verdict in verdicts if verdict.family == family]
        faster = statistics.geometric_mean(
            [1 / (1 + regret(verdict, single)) for verdict in members]
        )
        chosen = ", ".join(dict.fromkeys(verdict.chosen for verdict in members))
        against = [_against(members, clock) for clock in ("device_us", "wall_us")]
        table.add_row(family, str(len(members)), f"{faster:.2f}", *against, chosen)
    console.output().print(table)


def _against(members: Sequence[Verdict], clock: str) -> str:
    """FlashInfer's time divided by the choice's, mean ± standard deviation."""
    times = [getattr(verdict, clock) for verdict in members]
    ratios = [
        found[FLASHINFER] / found[verdict.chosen]
        for found, verdict in zip(times, members, strict=True)
        if FLASHINFER in found
    ]
    return f"{statistics.fmean(ratios):.2f} ± {statistics.pstdev(ratios):.2f}" if ratios else "-"
