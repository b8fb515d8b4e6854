"""The host's work in a step of decoding rows, by parts: `python -m bench.host_steps`.

The engine is the real one: its loop, scheduler, cache manager, batcher, planner and the packing of
plans for a GPU's kernels. As on a GPU it launches a step before it reads the tokens of the one
before. The model computes nothing: all logits of its 64 tokens are zero. So what is measured is
Python and NumPy. What a GPU adds on the host is missing: pinned copies and the launch of a graph.
The parts are those of `lab/tangram_lab/load/parts.py`:

- `schedule`: rows and their pages;
- `plan`: tables, lengths and plans for the kernels;
- `commit`: what is published in the prefix cache;
- `emit`: the rest: the inputs of the pass, the choice of tokens, their events.

The shape is that of Qwen3-4B; ρ 0.25 has one of its profiles. Every row is a request of its own,
whose prompt shares nothing. The clock is the thread's processor time. With --profile the functions
with the most time of their own are listed instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.kernels.budgets import load
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.loop import Engine, Parts
from tangram.engine.passes.device_tables import DeviceTables
from tangram.engine.passes.runner import Runner, RunnerSettings
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.triton_kernels import TritonKernels
from tangram.link.collection import keep_uncollected
from tangram.model.dummy import number_tokens
from tangram.model.load import LoadedModel
from tangram.types import Event, Geometry, Request, SamplingParams
from tangram_lab.environment import environment
from tangram_lab.load.parts import PartClock

RESULT = Path(__file__).parent / "results" / "host_steps.json"
PROFILE = "qwen3-4b-instruct-2507.keydiff.layer.c512.r0.25"
PARTS = {
    "schedule": ("scheduling and reservation",),
    "plan": ("planning", "tables"),
    "commit": ("prefix cache",),
    "emit": ("sampling and text",),
}
VOCABULARY, PROCESSORS = 64, 132  # of an H100 or H200
SETTLING_STEPS = 4  # behind the prompts: in the first the plan is made


class IdleModel(torch.nn.Module):
    """A model that computes nothing."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self._zeros = torch.zeros(1, 4096, VOCABULARY)

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> SimpleNamespace:
        """Logits [1, n, V] of the n places of `logits_to_keep`."""
        return SimpleNamespace(logits=self._zeros[:, : len(logits_to_keep)])


def idle_engine(rows: int, kv_retention: float, most_tokens: int) -> Engine:
    """An engine of Qwen3-4B's shape that computes nothing, for `rows` sequences at once."""
    profile = load(PROFILE, None, page_tokens=None, heads_per_page=None)
    shape, windows = profile.model, (None,) * len(profile.layers)
    heads = shape.kv_heads, shape.query_heads, shape.head_dim
    geometry = Geometry(len(windows), *heads, VOCABULARY, most_tokens, windows)
    sizes = {
        "chunk_tokens": profile.chunk_tokens,
        "page_tokens": profile.page_tokens,
        "heads_per_page": profile.heads_per_page,
    }
    whole = Layout.lay_out_uncompressed(geometry, max_tokens=most_tokens, **sizes)
    retentions = [Retention(1.0, whole, "full")]
    if kv_retention < 1.0:
        budgets: dict[str, Any] = {"groups": profile.groups, "sealed_pages": profile.sealed_pages}
        layout = Layout.build(geometry, max_tokens=most_tokens, **sizes, **budgets)
        retentions.insert(0, Retention(kv_retention, layout, "profile", scorer="keydiff"))
    config = EngineConfig(
        kv_retention=kv_retention,
        max_num_seqs=rows,
        max_num_batched_tokens=2048 + rows,
        max_model_len=most_tokens,
        **sizes,
    )
    pages = rows * retentions[0].layout.most_pages(most_tokens)
    cache = CacheManager(retentions, total_pages=pages, max_sequences=rows, prefix_caching=True)
    loaded = LoadedModel(
        "idle",
        IdleModel(),
        number_tokens(VOCABULARY),
        geometry,
        shape,
        (),
        "",  # type: ignore[arg-type]
    )
    card = replace(Card.of(torch.device("cpu")), processors=PROCESSORS)
    runner = Runner(
        loaded,
        retentions,
        {"keydiff": KeyDiff()},
        cache,
        RunnerSettings(
            pages=1,  # nothing is written
            kernels=lambda pool: TritonKernels(pool, card=card),
        ),
    )
    # Those of a GPU follow every write.
    runner.passes.tables = DeviceTables(cache, torch.device("meta"))
    admission = Admission(retentions, pages, "bfloat16", 2, most_tokens, 0)
    limits = StepLimits(rows, config.max_num_batched_tokens, config.prompt_patience)
    scheduler = Scheduler(cache, limits, passes_apart=runner.passes.takes_apart)
    engine = Engine(Parts(config, loaded, admission, scheduler, runner, None))
    engine.ahead = True
    return engine


def begin(engine: Engine, rows: int, tokens: int, answer: int, events: list[Event]) -> None:
    """Have `rows` requests of `tokens` tokens decode; `events` takes what they are told."""
    random = np.random.default_rng(0)
    params = SamplingParams.state_all(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for number in range(rows):
        prompt = tuple(random.integers(0, VOCABULARY, tokens).tolist())
        engine.submit(Request(str(number), prompt, params, events.append))
    begun = set[str]()
    while len(begun) < rows:
        engine.step()
        begun |= {event.request_id for event in events}
        events.clear()
    for _ in range(SETTLING_STEPS):
        engine.step()
    events.clear()


def measure(engine: Engine, rows: int, steps: int, events: list[Event]) -> dict[str, list[float]]:
    """Microseconds of each part, step by step."""
    found: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    with PartClock(engine.device, time.thread_time).watching() as clock:
        for _ in range(steps):
            clock.reset()
            engine.step()
            split = clock.split()
            if len(events) != rows:
                raise SystemExit(f"a step told {len(events)} rows of {rows}: nothing is reported")
            events.clear()
            for name, parts in PARTS.items():
                found[name].append(1e6 * split.share(*parts) * split.total_s)
            found["step"].append(sum(found[name][-1] for name in PARTS))
    return found


def main() -> None:
    """Measure, print the table, keep the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument(
        "--retentions", type=float, nargs="+", default=[1.0, 0.25], choices=(1.0, 0.25)
    )
    parser.add_argument("--tokens", type=int, default=300, help="of each prompt")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    table = Table(title="µs of a step on the host: median (90th percentile)")
    for column in ("ρ", "rows", "step", *PARTS, "a row"):
        table.add_column(column, justify="right")
    lines = []
    for kv_retention in options.retentions:
        for rows in options.rows:
            answer = options.steps + 4 * SETTLING_STEPS + rows
            with keep_uncollected():  # as a server does
                engine = idle_engine(rows, kv_retention, options.tokens + answer)
            events = list[Event]()
            begin(engine, rows, options.tokens, answer, events)
            if options.profile:
                show_profile(engine, options.steps)
                continue
            found = measure(engine, rows, options.steps, events)
            lines.append({"kv_retention": kv_retention, "rows": rows, "us": found})
            medians = {name: statistics.median(times) for name, times in found.items()}
            most = sorted(found["step"])[int(0.9 * options.steps)]
            table.add_row(
                f"{kv_retention:g}",
                str(rows),
                f"{medians.pop('step'):,.0f} ({most:,.0f})",
                *(f"{medians[name]:,.0f}" for name in PARTS),
                f"{statistics.median(found['step']) / rows:.1f}",
            )
    if lines:
        Console(width=100).print(table)
    if options.output is not None:
        content = {
            "command": shlex.join(["python", "-m", "bench.host_steps", *sys.argv[1:]]),
            "environment": environment(),
            "rows": lines,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")


def show_profile(engine: Engine, steps: int) -> None:
    """Print the functions that take the most time of their own."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
