"""Decode while rows arrive, grow and leave: PersistentKV's families as arrival processes.

    python -m bench.kernels.living [--seeds 0,1] [--heads 32/8] [--steps 2048] [--snapshots 4]

Each process runs on the host for `--steps` steps. Its batch is measured at some of those in which
rows came or went: device time, and the wall time of a step with and without planning. A schedule
that is kept plans in such steps alone, and FlashInfer at every step. The table spreads planning
over the steps between two changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from bench.kernels import kernel_report
from bench.kernels.family import Entry, Run, execute, parser
from bench.kernels.summary import mean_steps
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case
from tangram_lab.kernel_benchmarks.traces import LIVING_TRACES, SEEDS, LivingTrace

PLANNERS = ("workqueue", "aot", "buckets:exact", "buckets:padded")
PEERS = ("decode", "batch")
TINY_DIVISOR = 256


def snapshots(
    living: LivingTrace, seed: int, steps: int, count: int
) -> tuple[list[list[int]], float]:
    """The lengths at `count` of the steps in which rows came or went, and steps between such."""
    changed = [lengths for change, lengths in living.batches(seed, steps) if change]
    chosen = changed[len(changed) // (count + 1) :: max(1, len(changed) // (count + 1))][:count]
    return chosen, steps / len(changed)


def make(name: str, lengths: Sequence[int], geometry: BatchGeometry, seed: int, tiny: bool) -> Case:
    """The batch of a step; tiny: a 256th of its lengths, at most 8 rows."""
    if tiny:
        lengths = [length // TINY_DIVISOR + 1 for length in lengths[:8]]
    return own_case(name, lengths, geometry, seed)


def show(run: Run) -> None:
    """Per family: mean device time, wall time of a step, and what was counted of the work."""
    table = Table(title="living: means over snapshots, µs")
    figures = ("device", "wall of a step", "plan", "tasks / SM", "KB", "launches")
    for column in ("family", "contender", *figures):
        table.add_column(column, justify="right" if column in figures else "left")
    for mean in mean_steps(run.rows):
        table.add_row(
            mean.group,
            mean.contender,
            *("-" if value is None else f"{value:.1f}" for value in mean.values),
        )
    console = Console(width=kernel_report.WIDTH)
    console.print(table)
    kernel_report.show_failures(console, run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family."""
    options_of = parser(__doc__, PLANNERS, PEERS, page_tokens=16)
    options_of.add_argument("--seeds", default="0,1", help="comma-separated")
    options_of.add_argument("--heads", default="32/8", help="query/KV heads")
    options_of.add_argument("--steps", type=int, default=2048, help="of each process")
    options_of.add_argument("--snapshots", type=int, default=4, help="that are measured of each")
    options = options_of.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(seeds) - set(SEEDS):
        raise SystemExit(f"--seeds has {min(unknown)}, held-out seeds are 0 to 4")
    geometry = BatchGeometry.of_heads(options.heads, options.page_tokens, options.heads_per_page)
    entries = []
    for living in LIVING_TRACES[:1] if options.quick else LIVING_TRACES:
        for seed in seeds:
            chosen, between = snapshots(living, seed, options.steps, options.snapshots)
            for number, lengths in enumerate(chosen):
                name = f"{living.trace.name} seed {seed}, snapshot {number}"
                labels = {"steps_between": between, "lengths": lengths, "seed": seed}
                entries.append(
                    Entry(
                        name,
                        living.trace.name,
                        partial(make, name, lengths, geometry, seed),
                        labels,
                    )
                )
    execute("living", options, entries, show)


if __name__ == "__main__":
    main()
