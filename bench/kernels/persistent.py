"""Decode over uneven lengths: PersistentKV's trace families on held-out seeds.

Device time, and wall time of a step with host planning for contenders that plan at every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from bench.kernels import kernel_report
from bench.kernels.family import Entry, Run, execute, parser
from bench.kernels.summary import BEST, by_group, device_us, names, ratios
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case
from tangram_lab.kernel_benchmarks.traces import QUICK_TRACES, SEEDS, TRACES, Trace

PLANNERS = ("workqueue", "aot", "uniform", "buckets:exact", "buckets:padded")
PEERS = ("decode", "batch")
TINY_DIVISOR = 256


def make(trace: Trace, geometry: BatchGeometry, seed: int, tiny: bool) -> Case:
    """The trace's batch; tiny: a 256th of its lengths."""
    lengths = trace.lengths(seed)
    if tiny:
        lengths = [length // TINY_DIVISOR + 1 for length in lengths]
    return own_case(f"{trace.name} seed {seed}", lengths, geometry, seed)


def show(run: Run) -> None:
    """Per family, over its seeds: mean device time, and mean ± standard deviation of the ratios to
    FlashInfer.
    """
    variants, peers = names(run.rows, ours=True), names(run.rows, ours=False)
    table = Table(
        title="persistent: mean device µs over seeds; × best FlashInfer: device, wall (mean ± std)"
    )
    table.add_column("family", no_wrap=True)
    for name in [*variants, *peers]:
        table.add_column(name.replace("flashinfer", "fi"), justify="right")
    for variant in variants[:2]:
        for clock in ("device", "wall"):
            table.add_column(f"{variant} × {clock}", justify="right")
    for group, rows in by_group(run.rows).items():
        times = [device_us(row) for row in rows]
        cells = [
            _mean([found[name] for found in times if name in found]) for name in [*variants, *peers]
        ]
        spread = [
            _spread(ratios(rows, v, BEST, wall=wall))
            for v in variants[:2]
            for wall in (False, True)
        ]
        table.add_row(f"{group} ({len(rows)})", *cells, *spread)
    console = Console(width=kernel_report.WIDTH)
    console.print(table)
    kernel_report.show_failures(console, run)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}" if values else "-"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.pstdev(values):.2f}" if values else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family."""
    options_of = parser(__doc__, PLANNERS, PEERS, page_tokens=16)
    options_of.add_argument(
        "--seeds", default=None, help="comma-separated; default: the held-out ones"
    )
    options_of.add_argument("--heads", default="32/8", help="query/KV heads")
    options = options_of.parse_args(arguments)
    held_out = list(SEEDS[:2] if options.quick else SEEDS)
    seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else held_out
    geometry = BatchGeometry.of_heads(options.heads, options.page_tokens, options.heads_per_page)
    entries = [
        Entry(
            f"{trace.name} seed {seed}",
            trace.name,
            partial(make, trace, geometry, seed),
            {
                "family": trace.family,
                "batch": trace.batch,
                "seed": seed,
                "lengths": trace.lengths(seed),
            },
        )
        for trace in (QUICK_TRACES if options.quick else TRACES)
        for seed in seeds
    ]
    execute("persistent", options, entries, show)


if __name__ == "__main__":
    main()
