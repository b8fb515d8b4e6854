"""Packing end to end, on and off, with nothing dropped (PAT, arXiv 2511.22333, end to end).

    python -m bench.serving.agents -o bench/results

The load are agents: all share a system prompt, a fourth of them a tool's text, a sixteenth a
history. They arrive at random at several rates. With --trace a recorded conversation follows. Two
engines run one after the other on one model: as served, and with rows planned apart from each
other. Then as many agents as decode at once are profiled: what attention takes of a step, and how
many entries a plan loads, beside the least possible and beside rows apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.serving.competitors import MODELS, StartedEngine, make_parser
from bench.serving.timeline import measure_decode, split_busy
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.card_cost import count_programs, estimate_cost
from tangram.link.collection import keep_uncollected
from tangram.model.load import load_configured
from tangram.types import Geometry
from tangram_lab.baselines.compared_engines import Baseline
from tangram_lab.baselines.compared_schedules import parse_schedule
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.case import BatchGeometry, tree_case
from tangram_lab.kernel_benchmarks.counters import WorkCounters
from tangram_lab.kernel_benchmarks.tree import Tree
from tangram_lab.load.asks import Ask, arriving, draw_tokens, read_trace
from tangram_lab.load.clock import Summary, answer_all

# None is the schedule that serves.
SCHEDULES: Mapping[str, str | None] = {"packed": None, "apart": "workqueue"}
SERVED = "packing:thrifty"
TOOLS, HISTORIES = 4, 16
PAGE_TOKENS = EngineConfig.page_tokens


def make_agents(count: int, sizes: Sequence[int], output_tokens: int, vocabulary: int) -> list[Ask]:
    """`count` agents; `sizes` are the tokens of system prompt, tool text, history and own part."""

    def draw(level: int, number: int) -> tuple[int, ...]:
        return draw_tokens(sizes[level], vocabulary, 20 + level, number)

    return [
        Ask(draw(0, 0) + draw(1, n % TOOLS) + draw(2, n % HISTORIES) + draw(3, n), output_tokens)
        for n in range(count)
    ]


def count_loads(
    geometry: Geometry, sizes: Sequence[int], count: int, card: Card
) -> dict[str, float]:
    """Entries that a plan for `card` loads for `count` agents, as multiples of the distinct ones.

    `apart` is what rows load that share nothing.
    """
    tree = Tree((1, TOOLS, HISTORIES, count), tuple(sizes))
    heads = f"{geometry.query_heads}/{geometry.kv_heads}"
    shape = BatchGeometry.of_heads(heads, PAGE_TOKENS, head_dim=geometry.head_dim)
    case = tree_case(tree, shape, seed=0)
    pool = torch.empty(
        (1, shape.heads_per_page, 2, PAGE_TOKENS, shape.head_dim),
        dtype=torch.bfloat16,
        device="meta",
    )
    cost, programs = estimate_cost(pool, shape.group, card), count_programs(pool, shape.group, card)
    plan = parse_schedule(SERVED).plan(case.decoding, card.processors, cost, programs)
    read = WorkCounters.of([plan], case, card.processors).task_kv_bytes
    return {"packed": read / case.unique_bytes, "apart": case.read_bytes / case.unique_bytes}


def measure_engine(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Loads at each rate, the trace, and a profiled step."""
    sizes, vocabulary = options.sizes, engine.geometry.vocab_size
    most = HISTORIES + max(int(rate * options.seconds) for rate in options.rates)
    agents = make_agents(most, sizes, options.output_tokens, vocabulary)
    warm = make_agents(HISTORIES, sizes, 1, vocabulary)
    answer_all(engine, [replace(ask, output_tokens=8) for ask in agents[: options.decoding]])
    kept: dict[str, Any] = {"rates": {}}
    for rate in options.rates:
        engine.clear_cache()
        answer_all(engine, warm)  # what agents share is cached, as it is in a server
        asks = arriving(agents[HISTORIES : HISTORIES + int(rate * options.seconds)], rate)
        kept["rates"][f"{rate:g}"] = asdict(Summary.of(answer_all(engine, asks)))
    if options.trace is not None:
        engine.clear_cache()
        asks = read_trace(
            options.trace, seconds=options.trace_seconds, speed=1.0, vocab_size=vocabulary
        )
        fit = [ask for ask in asks if len(ask.tokens) + ask.output_tokens < engine.max_model_len]
        summary = Summary.of(answer_all(engine, fit))
        kept["trace"] = asdict(summary) | {"left_out": len(asks) - len(fit)}
    prompts = [ask.tokens for ask in make_agents(options.decoding, sizes, 1, vocabulary)]
    if engine.device.type == "cuda":
        kept["step"] = measure_decode(StartedEngine(engine, {}), prompts)
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, keep the file after every engine, print a table."""
    options = parse(arguments)
    config = EngineConfig(
        model=str(MODELS / options.model),
        load_format="dummy",
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.batched_tokens + options.max_num_seqs,
        kv_cache_gib=options.kv_cache_gib,
    )
    loaded = load_configured(config)
    card = Card.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found: dict[str, Any] = {}
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.agents", *sys.argv[1:]]),
        "environment": environment(),
        "model": options.model,
        "load": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("model", "output")
        },
        "loads": count_loads(loaded.geometry, options.sizes, options.decoding, card),
        "engines": found,
    }
    for name, schedule in SCHEDULES.items():
        with keep_uncollected():  # as `tangram serve` does
            engine = Baseline(decode_schedule=schedule).engine(config, loaded)
        found[name] = measure_engine(engine, options)
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        path = options.output / f"agents_{options.model}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    Console().print(make_table(content))


def make_table(content: Mapping[str, Any]) -> Table:
    """A row a load, a column an engine."""
    table = Table("", *content["engines"])

    def add(title: str, show: Any) -> None:
        table.add_row(title, *(show(found) for found in content["engines"].values()))

    def times(summary: Mapping[str, Any]) -> str:
        ttft, tpot = summary["ttft_s"], summary["tpot_ms"]
        return (
            f"TTFT {ttft['p50']:.3f} / {ttft['p90']:.3f} s, TPOT {tpot['p50']:.1f} / "
            f"{tpot['p90']:.1f} ms, {summary['requests_per_s']:.2f} requests/s"
        )

    first = next(iter(content["engines"].values()))
    for rate in first["rates"]:
        add(f"{rate} agents/s", lambda found, rate=rate: times(found["rates"][rate]))
    if "trace" in first:
        add("trace", lambda found: times(found["trace"]))
    if "step" in first:
        add("a step, ms", lambda found: f"{statistics.median(found['step']['wall_ms']):.2f}")
        add("attention", lambda found: f"{split_busy(found['step'])['attention']:.2f} ms")
    table.add_row(
        "loads / least", *(f"{content['loads'][name]:.2f}" for name in content["engines"])
    )
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser("agents", __doc__)
    parser.add_argument("--kv-cache-gib", type=float, help="default: what is free")
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=4,
        default=[8192, 2048, 1024, 128],
        help="tokens of system prompt, tool text, history and own part",
    )
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 8, 16, 32], help="agents/s")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals at each rate")
    parser.add_argument("--decoding", type=int, default=48, help="agents of the profiled step")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument("--trace-seconds", type=float, default=40.0, help="of it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
