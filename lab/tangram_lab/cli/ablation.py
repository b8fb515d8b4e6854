"""`tangram bench serving ablation`: what each part of the system contributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tangram.cli import console
from tangram.cli.options import number
from tangram.config import MOST_TOKENS, EngineConfig
from tangram.limits import Bounds
from tangram_lab.cli.options import with_measured_config
from tangram_lab.cli.serving import (
    Output,
    TpotLimit,
    TtftLimit,
    percentiles,
    positive,
    write_figures,
)

if TYPE_CHECKING:
    from tangram.engine.loop import Engine
    from tangram_lab.load.ablation import Rung
    from tangram_lab.load.asks import Ask
    from tangram_lab.load.clock import LatencyLimits

Figures = Mapping[str, dict[str, Any]]  # by rung
_ALL = "full-kv, reservation, ragged-paging, clustering, aot, served"


@with_measured_config
def ablation(
    config: EngineConfig,
    rungs: Annotated[str, typer.Option(help="engines to compare, comma-separated")] = _ALL,
    batch_requests: Annotated[
        int,
        number(Bounds(1, 10**6), "requests, all at once, of the breakdown of prefill and decode"),
    ] = 8,
    requests: Annotated[int, number(Bounds(1, 10**6), "requests at each rate")] = 32,
    input_tokens: Annotated[
        int, number(Bounds(1, MOST_TOKENS), "prompt tokens of each request")
    ] = 4096,
    output_tokens: Annotated[int, number(Bounds(2, MOST_TOKENS), "tokens of each answer")] = 128,
    rates: Annotated[
        str, typer.Option(help="mean requests per second, comma-separated; arrivals are random")
    ] = "0.5,1,2,4",
    ttft_limit_s: TtftLimit = None,
    tpot_limit_ms: TpotLimit = None,
    output: Output = None,
    plot: Annotated[
        Path | None, typer.Option(help="plot TTFT against the rate to this file (PNG)")
    ] = None,
) -> None:
    """The contribution of each part: full KV, + reservation, + ragged paging, + clustering, + AOT.

    Decode seals a chunk only if --output-tokens fill one.
    """
    from tangram.engine.setup.option_checks import longest_sequence
    from tangram_lab.accuracy.plot import check_plot
    from tangram_lab.load.ablation import check_comparable, choose_rungs
    from tangram_lab.load.clock import LatencyLimits

    if plot is not None:
        check_plot(plot)
    per_second = [positive("rates", text) for text in rates.split(",")]
    load = _AblationLoad(batch_requests, requests, input_tokens, output_tokens, per_second)
    chosen = choose_rungs(rungs)
    check_comparable(config)
    load.check(longest_sequence(config))
    title = (
        f"{input_tokens} in, {output_tokens} out; batch of {batch_requests}; {requests} at {rates} "
        "requests/s"
    )
    figures = _measure(
        config,
        chosen,
        load,
        LatencyLimits(ttft_limit_s, tpot_limit_ms),
        lambda named, found: write_figures(output, title, named, {"rungs": found}),
    )
    console.output().print(f"{title}; kv_retention {config.kv_retention}")
    for phase, unit in (("prefill", "1,000 prompt tokens"), ("decode", "step")):
        _show_split(figures, phase, f"{phase}: ms of {unit}")
    _show_rates(figures)
    if plot is not None:
        _draw(figures, title, plot)


@dataclass(frozen=True)
class _AblationLoad:
    """The requests of every rung; `rates` in requests per second."""

    batch_requests: int
    requests: int
    input_tokens: int
    output_tokens: int
    rates: Sequence[float]

    @property
    def count(self) -> int:
        """The most requests at a time."""
        return max(self.batch_requests, self.requests)

    def check(self, most_tokens: int) -> None:
        """Raise `ConfigError` if they are longer than sequences may be."""
        from tangram_lab.load.asks import check_lengths

        check_lengths(
            "input_tokens", self.count, self.input_tokens, self.output_tokens, most_tokens
        )

    def asks(self, engine: Engine) -> list[Ask]:
        """Requests that share no prefix. Raises `ConfigError` if `engine` cannot take them."""
        from tangram_lab.load.asks import alike

        self.check(engine.max_model_len)
        return alike(
            self.count,
            self.input_tokens,
            self.output_tokens,
            shared_tokens=0,
            vocab_size=engine.geometry.vocab_size,
        )


def _measure(
    config: EngineConfig,
    rungs: Sequence[Rung],
    load: _AblationLoad,
    limits: LatencyLimits,
    save: Callable[[EngineConfig, Figures], None],
) -> Figures:
    """The figures of `rungs`. `save` takes them after each rung, since a later one may fail."""
    from tangram_lab.load.ablation import at_rate, breakdowns, describe, for_each

    figures: dict[str, dict[str, Any]] = {}

    def measure(rung: Rung, engine: Engine) -> None:
        asks = load.asks(engine)
        progress.update(task, description=f"{rung.title}: prefill and decode")
        found = figures[rung.name] = describe(rung, engine) | {"rates": {}}
        splits = breakdowns(engine, asks[: load.batch_requests])
        found["breakdown"] = {phase: asdict(split) for phase, split in splits.items()}
        progress.advance(task)
        for rate in load.rates:
            progress.update(task, description=f"{rung.title}: {rate:g} requests/s")
            found["rates"][f"{rate:g}"] = at_rate(engine, asks[: load.requests], rate, limits)
            progress.advance(task)
        named = engine.config
        save(replace(config, scorer=named.scorer, scope=named.scope), figures)

    with console.progress(counted=False) as progress:
        task = progress.add_task("loading", total=len(rungs) * (1 + len(load.rates)))
        for_each(config, rungs, measure)
    return figures


def _show_split(figures: Figures, phase: str, title: str) -> None:
    """Print a row for each part and a column for each rung."""
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
    """Print a row for each rung and rate."""
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
    """Plot TTFT p50 and p90 against the rate, a line for each rung."""
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
