"""`tangram bench fleet`: routing over simulated replicas."""

from __future__ import annotations

import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tangram.cli import console
from tangram.cli.options import number
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram_lab.cli.serving import Output

if TYPE_CHECKING:
    from tangram_lab.fleet.simulation import Loss

_MOST_REPLICAS = 4096


class Balancing(StrEnum):
    """A way to choose replicas: see `tangram_lab.fleet.policies`."""

    routing = "routing"
    no_reports = "no-reports"
    hash_first = "hash-first"
    hash_second = "hash-second"
    least_loaded = "least-loaded"
    round_robin = "round-robin"
    ideal = "ideal"


def fleet(
    trace: Annotated[Path, typer.Argument(help="a Mooncake trace (JSON lines)")],
    replicas: Annotated[str, typer.Option(help="sizes of the fleet, as 1,4,64")] = "1,4,16,64",
    balancers: Annotated[
        list[Balancing] | None,
        typer.Option("--balancer", help="repeat for more", show_default="all"),
    ] = None,
    replicas_per_copy: Annotated[
        float | None,
        number(
            Bounds(0, 1e6, open_low=True),
            "send a copy of the trace for each so many replicas",
            show_default="one copy",
        ),
    ] = None,
    seconds: Annotated[float, number(Bounds(1, 1e6), "length of the trace to replay")] = 3600.0,
    report_s: Annotated[
        float, number(Bounds(0.25, 600), "seconds from one report of a replica to the next")
    ] = 1.0,
    lose_at_s: Annotated[
        float | None,
        number(
            Bounds(0, 1e6), "the busiest replica dies then, and an empty one comes a minute later"
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="costs of an engine (JSON)", show_default="Qwen3-4B at ρ 0.25, an H200"),
    ] = None,
    output: Output = None,
) -> None:
    """Replay a trace over simulated replicas: hits, first tokens, balance and decisions.

    No model runs: a replica takes the time that the costs of an engine say. The router is the one
    that serves.
    """
    from tangram_lab.fleet.arrivals import count_ideal_hits, read_arrivals
    from tangram_lab.fleet.costs import EngineCosts
    from tangram_lab.fleet.simulation import Loss, SimulatedFleet

    engine = EngineCosts() if costs is None else EngineCosts.read(costs)
    loss = None if lose_at_s is None else Loss(lose_at_s)
    sizes, rows = _read_sizes(replicas), list[dict[str, Any]]()
    chosen = [Balancing(name) for name in (balancers or list(Balancing))]
    with console.progress(counted=False) as bar:
        task = bar.add_task("replays", total=len(sizes) * len(chosen))
        for size in sizes:
            copies = 1 if replicas_per_copy is None else max(1, round(size / replicas_per_copy))
            arrivals = read_arrivals(trace, seconds=seconds, copies=copies)
            ideal = count_ideal_hits(arrivals)
            for name in chosen:
                run = SimulatedFleet(name.value, size, engine, report_s=report_s).replay(
                    arrivals, loss
                )
                rows.append({"copies": copies, **run.figures(ideal)})
                bar.advance(task)
    _show(rows)
    if output is not None:
        setting = _describe(trace, output, seconds, loss) | {"costs": engine.model_dump()}
        output.write_text(json.dumps(setting | {"runs": rows}, indent=1) + "\n")


def _read_sizes(text: str) -> list[int]:
    """Raises `ConfigError` unless `text` lists sizes of fleets."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= size <= _MOST_REPLICAS for size in sizes):
        raise ConfigError(
            f"replicas is {text!r}, it must list numbers from 1 to {_MOST_REPLICAS}, as 1,4,64"
        )
    return sizes


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="a simulated fleet")
    table.add_column("balancer", no_wrap=True)
    for column in (
        "size",
        "hits",
        "of\nideal",
        "TTFT\np50 s",
        "p90",
        "p99",
        "most/\nmean",
        "choice\np50 µs",
        "p99",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["balancer"],
            str(row["replicas"]),
            f"{row['hit_share']:.3f}",
            f"{row['of_ideal']:.3f}",
            *(f"{row['ttft_s'][share]:.2f}" for share in ("p50", "p90", "p99")),
            f"{row['most_over_mean']['computed_tokens']:.2f}",
            *(f"{row['decision_us'][share]:,.0f}" for share in ("p50", "p99")),
        )
    console.output().print(table)


def _describe(trace: Path, output: Path, seconds: float, loss: Loss | None) -> dict[str, Any]:
    from tangram_lab.environment import environment

    names = {str(path): path.name for path in (trace, output)}  # folders here say nothing there
    return {
        "command": shlex.join(["tangram", *(names.get(word, word) for word in sys.argv[1:])]),
        "environment": environment(),
        "trace": trace.name,
        "seconds": seconds,
        "lost": None if loss is None else {"at_s": loss.at_s, "gone_s": loss.gone_s},
    }
