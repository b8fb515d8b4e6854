"""`tangram bench serving ablation`: what each part of the system is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tangram.cli import console
from tangram.cli.options import number, with_config
from tangram.cli.serving import Output, TpotLimit, TtftLimit, keep, percentiles, positive
from tangram.config import MOST_TOKENS, EngineConfig
from tangram.limits import Bounds

if TYPE_CHECKING:
    from tangram.engine.loop import Engine
    from tangram.lab.load.ablation import Rung

Figures = Mapping[str, dict[str, Any]]  # by rung
_ALL = "full-kv, reservation, ragged-paging, clustering, aot, served, dynamic"


@with_config
def ablation(
    config: EngineConfig,
    rungs: Annotated[str, typer.Option(help="engines to compare, comma-separated")] = _ALL,
    batch_requests: Annotated[
        int, number(Bounds(1, 10**6), "requests, all at once, whose prefill and decode are split")
    ] = 8,
    requests: Annotated[int, number(Bounds(1, 10**6), "requests at each rate")] = 32,
    input_tokens: Annotated[
        int, number(Bounds(1, MOST_TOKENS), "prompt tokens of each request")
    ] = 4096,
    output_tokens: Annotated[int, number(Bounds(2, MOST_TOKENS), "tokens of each answer")] = 128,
    rates: Annotated[
        str, typer.Option(help="requests a second, comma-separated; they arrive at random")
    ] = "0.5,1,2,4",
    ttft_limit_s: TtftLimit = None,
    tpot_limit_ms: TpotLimit = None,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="draw TTFT against the rate here (PNG)")] = None,
) -> None:
    """What each part is worth: full KV, + reservation, + ragged paging, + clustering, + AOT;
    dynamic reclamation.

    Decode seals a chunk only where --output-tokens fill one.
    """
    from tangram.lab.accuracy.plot import check_plot
    from tangram.lab.load.ablation import at_rate, breakdowns, choose_rungs, describe, for_each
    from tangram.lab.load.asks import alike, check_lengths
    from tangram.lab.load.clock import LatencyLimits

    chosen, per_second = choose_rungs(rungs), [positive("rates", text) for text in rates.split(",")]
    limits, figures = LatencyLimits(ttft_limit_s, tpot_limit_ms), dict[str, dict[str, Any]]()
    if plot is not None:
        check_plot(plot)
    load = (
        f"{input_tokens} in, {output_tokens} out; batch of {batch_requests}; {requests} at {rates} "
        "requests/s"
    )

    def measure(rung: Rung, engine: Engine) -> None:
        count, vocabulary = max(batch_requests, requests), engine.geometry.vocab_size
        check_lengths("input_tokens", count, input_tokens, output_tokens, engine.max_model_len)
        asks = alike(count, input_tokens, output_tokens, shared_tokens=0, vocab_size=vocabulary)
        progress.update(task, description=f"{rung.title}: prefill and decode")
        found = figures[rung.name] = describe(rung, engine) | {"rates": {}}
        found["breakdown"] = {
            phase: asdict(split)
            for phase, split in breakdowns(engine, asks[:batch_requests]).items()
        }
        progress.advance(task)
        for rate in per_second:
            progress.update(task, description=f"{rung.title}: {rate:g} requests/s")
            found["rates"][f"{rate:g}"] = at_rate(engine, asks[:requests], rate, limits)
            progress.advance(task)
        # What comes later may fail or be cut short.
        keep(
            output,
            load,
            replace(config, scorer=engine.config.scorer, scope=engine.config.scope),
            {"rungs": figures},
        )

    with console.progress(counted=False) as progress:
        task = progress.add_task("loading", total=len(chosen) * (1 + len(per_second)))
        for_each(config, chosen, measure)
    console.output().print(f"{load}; kv_retention {config.kv_retention}")
    for phase, unit in (("prefill", "1,000 prompt tokens"), ("decode", "step")):
        _show_split(figures, phase, f"{phase}: ms of {unit}")
    _show_rates(figures)
    if plot is not None:
        _draw(figures, load, plot)


def _show_split(figures: Figures, phase: str, title: str) -> None:
    """A line a part, a column a rung."""
    table = Table("", title=title)
    for found in figures.values():
        table.add_column(found["title"], justify="right")
    splits = [found["breakdown"][phase] for found in figures.values()]
    for part in splits[0]["ms"]:
        table.add_row(part, *(f"{split['ms'][part]:.2f}" for split in splits))
    table.add_row(
        "all", *(f"{sum(split['ms'].values()):.2f}" for split in splits), end_section=True
    )
    table.add_row("sealing, reservation, tables", *(f"{split['upkeep']:.1%}" for split in splits))
    table.add_row("reclamation", *(f"{split['reclamation']:.1%}" for split in splits))
    table.add_row("chunks sealed meanwhile", *(f"{split['sealed_chunks']:,}" for split in splits))
    table.add_row("outside the forward pass", *(f"{split['outside']:.1%}" for split in splits))
    if phase == "prefill":
        table.add_row(
            "KV held of a sealed chunk",
            *(f"{found['footprint']:.3f}" for found in figures.values()),
        )
        table.add_row(
            "tokens that fit", *(f"{found['capacity_tokens']:,}" for found in figures.values())
        )
    console.output().print(table)


def _show_rates(figures: Figures) -> None:
    """A line a rung and rate."""
    columns = (
        "requests/s",
        "served/s",
        "goodput/s",
        "tokens/s",
        "TTFT s, p50 / 90 / 99",
        "TPOT ms, p50 / 90 / 99",
    )
    table = Table("", title="arrivals at random")
    for column in (*columns, "preempted"):
        table.add_column(column, justify="right")
    for found in figures.values():
        for rate, summary in found["rates"].items():
            table.add_row(
                found["title"],
                rate,
                f"{summary['requests_per_s']:.2f}",
                f"{summary['goodput_per_s']:.2f}",
                f"{summary['tokens_per_s']:,.0f}",
                percentiles(summary["ttft_s"], 2),
                percentiles(summary["tpot_ms"], 1),
                str(summary["preemptions"]),
            )
    console.output().print(table)


def _draw(figures: Figures, title: str, path: Path) -> None:
    """TTFT p50 and p90 against the rate, a line a rung."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.5), layout="constrained")
    for place, (axes, percentile) in enumerate(
        zip(picture.subplots(1, 2, sharey=True), ("p50", "p90"), strict=True)
    ):
        for found in figures.values():
            rates = found["rates"]
            seconds = [summary["ttft_s"][percentile] for summary in rates.values()]
            axes.plot([float(rate) for rate in rates], seconds, marker="o", label=found["title"])
        axes.set(
            xlabel="requests/s",
            ylabel="" if place else "s",
            title=f"TTFT {percentile}",
            yscale="log",
        )
        axes.grid(alpha=0.3)
    axes.legend()
    picture.suptitle(title, fontsize=10)
    picture.savefig(path, dpi=130)
