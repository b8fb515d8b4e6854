"""The output of a run: a line per case, a result file, and a short table at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kernels.family import Entry, Run
from bench.kernels.summary import BEST, by_group, device_us, floor_us, means, names
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.case import Case

WIDTH = 170


def case_row(entry: Entry, case: Case, ceilings: dict[str, float]) -> dict[str, Any]:
    """The facts of a case before it runs; times in microseconds."""
    unique = case.unique_bytes
    byte_floor = unique / ceilings["copy_bytes_per_us"]
    arithmetic_floor = case.operations / ceilings["operations_per_us"]
    return {
        "case": entry.name,
        "group": entry.group,
        "labels": entry.labels,
        "geometry": asdict(case.geometry),
        "shape": list(case.shape),
        "unique_bytes": unique,
        "read_bytes": case.read_bytes,
        "operations": case.operations,
        "byte_floor_us": byte_floor,
        "arithmetic_floor_us": arithmetic_floor,
        "contenders": [],
        "failed": {},
    }


def progress(row: dict[str, Any]) -> None:
    """One line on standard error, so that an interrupted run has shown something."""
    times = ", ".join(f"{c['name']} {c['median_us']:.1f}" for c in row["contenders"])
    failed = "".join(f"; {name}: {why}" for name, why in _failures(row))
    print(f"{row['case']} ({row['seconds']:.1f} s): {times}{failed}", file=sys.stderr, flush=True)


def _failures(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, why) for name, why in row["failed"].items() if not why.startswith("NotApplicable")
    ]


def write(run: Run) -> None:
    """The result file, whole or not at all."""
    run.options.out.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(run.options).items() if name != "out"}
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items()
    }
    content = {
        "command": f"python -m bench.kernels.{run.name}{_arguments(options)}",
        "options": options,
        "environment": environment(),
        "ceilings": run.ceilings,
        "left_out": run.left_out,
        "geometric_means": {
            group: {"device": means(rows), "wall": means(rows, wall=True)}
            for group, rows in {"all": run.rows, **by_group(run.rows)}.items()
        },
        "rows": run.rows,
    }
    path = run.options.out / f"kernels_{run.name}{'-fp8' if run.options.fp8 else ''}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def _arguments(options: dict[str, Any]) -> str:
    """The options as typed, without the time budget."""
    given = {name: value for name, value in options.items() if name != "budget_s" and value}
    return "".join(
        f" --{name.replace('_', '-')} {_check_type(name, value)}".rstrip()
        for name, value in given.items()
    )


def _check_type(name: str, value: Any) -> str:
    if value is True:
        return ""
    between = " " if name in ("configs", "profiles") else ","
    return between.join(map(str, value)) if isinstance(value, list) else str(value)


def show(run: Run) -> None:
    """The table: microseconds of contenders and the floor; the first variant against FlashInfer."""
    ours, peers = names(run.rows, ours=True), names(run.rows, ours=False)
    console = Console(width=WIDTH)
    table = Table(
        title=f"{run.name}: device µs, cold L2, median of {run.options.replays}", padding=(0, 1)
    )
    table.add_column("case", no_wrap=True)
    shown = [name.replace("flashinfer", "fi").replace("packing:", "") for name in ours + peers]
    for column in ["KV MB", "floor", *shown, "× best fi", "of copy", "/ floor"]:
        table.add_column(column, justify="right")
    for row in run.rows:
        table.add_row(row["case"], *_cells(row, ours, peers))
    console.print(table)
    show_means(console, run)
    show_failures(console, run)


def show_means(console: Console, run: Run) -> None:
    """One line a group and variant: the speed-up over each peer, by geometric mean."""
    for group, rows in by_group(run.rows).items():
        for variant, against in means(rows).items():
            listed = ", ".join(
                f"{value:.2f} × {peer.replace('flashinfer', 'fi')}"
                for peer, value in against.items()
            )
            console.print(
                f"{group} ({len(rows)}), {variant}: {listed}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def show_failures(console: Console, run: Run) -> None:
    """The cases that were left out, and the contenders without a time; one line for a contender
    that fails everywhere for one reason, as where its library is missing.
    """
    lines = [f"left out: {name}" for name in run.left_out]
    cases: dict[tuple[str, str], list[str]] = {}
    for row in run.rows:
        for failure in _failures(row):
            cases.setdefault(failure, []).append(row["case"])
    for (name, why), failed in cases.items():
        everywhere = len(failed) > 1 and len(failed) == len(run.rows)
        where = [f"all {len(failed)} cases"] if everywhere else failed
        lines += [f"FAILED {case}, {name}: {why}" for case in where]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cells(row: dict[str, Any], ours: list[str], peers: list[str]) -> list[str]:
    taken = device_us(row)
    floor = floor_us(row)
    listed = [f"{taken[name]:.1f}" if name in taken else "-" for name in ours + peers]
    first = next((taken[name] for name in ours if name in taken), None)
    against = ["-"] * 3
    if first is not None:
        faster = f"{taken[BEST] / first:.2f}" if BEST in taken else "-"
        against = [faster, f"{row['byte_floor_us'] / first:.2f}", f"{first / floor:.2f}"]
    return [f"{row['unique_bytes'] / 1e6:.0f}", f"{floor:.1f}", *listed, *against]
