"""The common part of the benchmark families: options, the loop over cases, and a time budget.

Every case is built, checked and timed by itself. Results are written after each, so that an
interrupted run keeps them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tangram.errors import TangramError
from tangram.plan.cost import CostModel
from tangram_lab.baselines.compared_schedules import KernelVariant
from tangram_lab.kernel_benchmarks.case import Case

RESULTS = Path(__file__).parent.parent / "results"
PEERS = ("decode", "decode-static", "batch", "cascade", "cascade-fa3", "fasttree", "fa3", "sdpa")
NO_DEVICE = (
    "this benchmark needs a CUDA device, torch finds none: try --dry-run, which checks tiny cases "
    "on the CPU"
)


@dataclass(frozen=True)
class Entry:
    """One case of a family: `make(tiny)` builds it, small enough for the CPU if `tiny`.

    Geometric means are taken over the entries of a `group`. `only` replaces all contenders by these
    variants of Tangram.
    """

    name: str
    group: str
    make: Callable[[bool], Case]
    labels: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] | None = None


@dataclass
class Run:
    """One family's run: its options and, once started, its measurements."""

    name: str
    options: argparse.Namespace
    started_s: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def out_of_time(self) -> bool:
        return bool(time.monotonic() - self.started_s > self.options.budget_s)


def parser(
    doc: str | None, planners: Sequence[str], peers: Sequence[str], *, page_tokens: int
) -> argparse.ArgumentParser:
    """The options of every family."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    comma: Callable[[str], list[str]] = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    made.add_argument(
        "--planners",
        type=comma,
        default=list(planners),
        help="see baselines/compared_schedules.py of the lab",
    )
    made.add_argument("--peers", type=comma, default=list(peers), help=f"of {', '.join(PEERS)}")
    made.add_argument("--page-tokens", type=int, default=page_tokens)
    made.add_argument(
        "--heads-per-page", type=int, default=None, help="default: all KV heads of a layer"
    )
    made.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    made.add_argument("--fp8", action="store_true", help="entries in FP8, queries as --dtype")
    made.add_argument("--replays", type=int, default=30)
    made.add_argument("--cost", type=Path, default=None, help="a measured cost model (JSON)")
    made.add_argument("--no-wall", action="store_true", help="device time only")
    made.add_argument(
        "--memory-gib", type=float, default=48.0, help="leave out cases whose pool is larger"
    )
    made.add_argument(
        "--budget-s", type=float, default=480.0, help="start no case after this many seconds"
    )
    made.add_argument("--quick", action="store_true", help="a few cases of the family")
    made.add_argument(
        "--dry-run", action="store_true", help="tiny cases on the CPU: plans, kernels and reference"
    )
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    return made


def make_case(entry: Entry, options: argparse.Namespace, tiny: bool) -> Case:
    """The entry's case, with entries as the options say."""
    case = entry.make(tiny)
    if options.fp8:
        return replace(case, geometry=replace(case.geometry, element_bytes=1))
    return case


def execute(
    name: str,
    options: argparse.Namespace,
    entries: Iterable[Entry],
    show: Callable[[Run], None] | None = None,
) -> None:
    """Run a family and print its table, by `show` if given. Exits with 2 and one line where there
    is no device.
    """
    if options.dry_run:
        from bench.kernels.dry_run import dry_run

        return dry_run(name, options, entries)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    from bench.kernels import kernel_report
    from tangram_lab.kernel_benchmarks.timing import Ceilings

    run = Run(name, options)
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    run.ceilings = asdict(Ceilings.measure(dtype, device))
    for entry in entries:
        if run.out_of_time:
            run.left_out.append(entry.name)
            continue
        _measure_entry(run, entry, device, dtype)
        kernel_report.write(run)
    kernel_report.write(run)
    (show or kernel_report.show)(run)
    return None


def _measure_entry(run: Run, entry: Entry, device: torch.device, dtype: torch.dtype) -> None:
    """Append the entry's row, or the reason why there is none."""
    from bench.kernels import kernel_report
    from tangram_lab.kernel_benchmarks.timing import ColdCache
    from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected

    started = time.monotonic()
    try:
        case = make_case(entry, run.options, tiny=False)
    except TangramError as error:
        run.left_out.append(f"{entry.name}: {error}")
        return
    if case.pool_bytes > run.options.memory_gib * 2**30:
        run.left_out.append(
            f"{entry.name}: its pool takes {case.pool_bytes / 2**30:.0f} GiB (--memory-gib)"
        )
        return
    workload = Workload.build(case, dtype, device)
    row = kernel_report.case_row(entry, case, run.ceilings)
    answer, cold = compute_expected(workload), ColdCache(device)
    for name, build in _contenders(run, entry, workload):
        try:
            row["contenders"].append(_time(run, build, answer, cold))
        except Exception as error:
            row["failed"][name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            )
            torch.cuda.synchronize()  # a broken device ends the run here
        gc.collect()
        torch.cuda.empty_cache()
    row["seconds"] = time.monotonic() - started
    run.rows.append(row)
    kernel_report.progress(row)


def _time(run: Run, build: Callable[[], Any], answer: Any, cold: Any) -> dict[str, Any]:
    from tangram_lab.kernel_benchmarks.timing import measure

    contender = build()
    result = measure(
        contender, answer, cold, replays=run.options.replays, wall=not run.options.no_wall
    )
    counters = getattr(contender, "counters", None)
    return {
        **result.as_dict(),
        "ours": counters is not None,
        "counters": asdict(counters) if counters else None,
    }


def _contenders(run: Run, entry: Entry, workload: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Tangram by variant, then the requested peers, each built when its turn comes."""
    from bench.kernels.peers import peer
    from tangram.kernels.triton.card import Card
    from tangram.kernels.triton.card_cost import estimate_cost
    from tangram_lab.kernel_benchmarks.contenders import Ours
    from tangram_lab.kernel_benchmarks.flashinfer import WORKSPACE_BYTES

    options = run.options
    card, group = Card.of(workload.device), workload.case.geometry.group
    cost = (
        CostModel(**json.loads(options.cost.read_text()))
        if options.cost
        else estimate_cost(workload.pool, group, card)
    )
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=workload.device)

    def ours(variant: KernelVariant) -> Callable[[], Any]:
        return lambda: Ours(variant, workload, card, cost)

    def theirs(name: str) -> Callable[[], Any]:
        return lambda: peer(name, workload, workspace)

    texts = options.planners if entry.only is None else entry.only
    variants = [KernelVariant.parse(text) for text in texts]
    peers = options.peers if entry.only is None else ()
    return [(variant.text, ours(variant)) for variant in variants] + [
        (name, theirs(name)) for name in peers
    ]
