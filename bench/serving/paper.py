"""Experiments of the Tangram paper (arXiv 2606.06302) on one shape, random weights and one card.

    python -m bench.serving.paper --model qwen3-4b -o bench/results

Engines that differ in ρ, in the heads of a page or in the schedule of decode run one after the
other in this process, with one model and equal bytes of KV pages. Each answers the
same requests, all at once (Fig. 10, 11 and 12). Some are also asked at rates, with long prompts
(Fig. 14), or tell what part of a decode step is planning (Table 1). The file is written after each
engine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.serving.competitors import MODELS, make_parser
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram_lab.baselines.compared_engines import Baseline
from tangram_lab.environment import environment
from tangram_lab.load.ablation import Rung, at_rate, breakdowns, describe, for_each
from tangram_lab.load.asks import alike
from tangram_lab.load.clock import NO_LIMITS, Summary, answer_all

RETENTIONS = (0.75, 0.5, 0.25)
UNIFORM = Baseline(decode_schedule="uniform")


def make_engines() -> dict[str, Rung]:
    """All engines by name; `changes` are made to a config of ρ 0.25."""
    listed = [Rung("full", "full KV", Baseline("monolithic", "uniform"), {"kv_retention": 1.0})]
    for rho in RETENTIONS:
        kept = {"kv_retention": rho}
        listed += [
            Rung(f"static-{rho}", f"ρ {rho}, reserved", UNIFORM, kept),
            Rung(f"served-{rho}", f"ρ {rho}, as served", changes=kept),
        ]
    quarter = {"kv_retention": 0.25}
    fp8 = quarter | {"kv_cache_dtype": "fp8"}
    listed.append(Rung("aot-0.25", "ρ 0.25, AOT", Baseline(decode_schedule="aot"), quarter))
    listed.append(Rung("fp8-0.25", "ρ 0.25, FP8 cache", changes=fp8))
    for heads in (1, 2, 8):  # 4 is what serves
        changes = quarter | {"heads_per_page": heads}
        listed.append(Rung(f"heads-{heads}", f"ρ 0.25, {heads} heads a page", changes=changes))
    return {rung.name: rung for rung in listed}


ENGINES = make_engines()
RATED = ("full", "static-0.25")
PARTED = ("static-0.25", "aot-0.25", "served-0.25", "fp8-0.25")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, keep the file after every engine, print a table."""
    options = parse(arguments)
    engines = [ENGINES[name] for name in options.engines.split(",")]
    found: dict[str, Any] = {}
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.paper", *sys.argv[1:]]),
        "environment": environment(),
        "model": options.model,
        "load": {
            name: value
            for name, value in vars(options).items()
            if name not in ("model", "engines", "output")
        },
        "engines": found,
    }

    def measure(rung: Rung, engine: Engine) -> None:
        found[rung.name] = measure_engine(rung, engine, options)
        path = options.output / f"paper_{options.model}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{rung.title:24} {line(found[rung.name])}", flush=True)

    for_each(make_config(options), engines, measure)
    Console().print(make_table(found))


def make_config(options: argparse.Namespace) -> EngineConfig:
    """The config that all engines change."""
    return EngineConfig(
        model=str(MODELS / options.model),
        load_format="dummy",
        dtype=options.dtype,
        device=options.device,
        kv_retention=0.25,
        scorer="keydiff",
        scope="model",
        max_model_len=options.rated_tokens + 1024,
        max_num_seqs=options.requests,
        max_num_batched_tokens=options.batched_tokens + options.requests,
        kv_cache_gib=options.kv_cache_gib,
    )


def measure_engine(rung: Rung, engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one engine."""
    vocabulary = engine.geometry.vocab_size

    def ask(count: int, input_tokens: int, output_tokens: int) -> list[Any]:
        return alike(count, input_tokens, output_tokens, shared_tokens=0, vocab_size=vocabulary)

    kept = describe(rung, engine) | {"runs": []}
    for _ in range(options.repeats):
        engine.clear_cache()
        answers = answer_all(
            engine, ask(options.requests, options.input_tokens, options.output_tokens)
        )
        kept["runs"].append(asdict(Summary.of(answers)))
    if rung.name in RATED:
        asks = ask(options.rated_requests, options.rated_tokens, 32)
        kept["rates"] = {
            rate: at_rate(engine, asks, float(rate), NO_LIMITS) for rate in options.rates.split(",")
        }
    if rung.name in PARTED:
        asks = ask(options.batch, options.input_tokens, options.output_tokens)
        parts = breakdowns(engine, asks)
        kept["breakdown"] = {phase: asdict(split) for phase, split in parts.items()}
    return kept


def line(figures: Mapping[str, Any]) -> str:
    """What is shown of an engine while others are still to come."""
    rates = {
        rate: f"{found['ttft_s']['p50']:.2f}" for rate, found in figures.get("rates", {}).items()
    }
    tokens = [run["output_tokens"] / run["seconds"] for run in figures["runs"]]
    shown = ", ".join(f"{value:.0f}" for value in tokens)
    return f"{shown} output tokens/s, {figures['capacity_tokens']:,} fit, TTFT s p50 {rates}"


def make_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row an engine."""
    table = Table(
        "engine", "output tokens/s", "tokens that fit", "TTFT s p50", "planning of a step"
    )
    for figures in found.values():
        tokens = ", ".join(
            f"{run['output_tokens'] / run['seconds']:.0f}" for run in figures["runs"]
        )
        waits = [f"{rate['ttft_s']['p50']:.2f}" for rate in figures.get("rates", {}).values()]
        share = ""
        if parts := figures.get("breakdown"):
            times = parts["decode"]["ms"]
            share = f"{parts['decode']['host_ms']['planning']:.2f} of {sum(times.values()):.2f} ms"
        table.add_row(
            figures["title"], tokens, f"{figures['capacity_tokens']:,}", " / ".join(waits), share
        )
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser("paper", __doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help="separated by commas; all")
    parser.add_argument("--kv-cache-gib", type=float, default=24.0, help="of every engine")
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--input-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="whose decode steps are looked at")
    parser.add_argument("--rated-requests", type=int, default=16)
    parser.add_argument("--rated-tokens", type=int, default=30000)
    parser.add_argument("--rates", default="0.5,1,2", help="requests/s of the long prompts")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.engines.split(",") if name not in ENGINES]:
        parser.error(f"engines has {unknown[0]}, there are {', '.join(ENGINES)}")
    return options


if __name__ == "__main__":
    main()
