"""What a decode step on a CPU is made of: `python -m bench.cpu_step`.

Linear maps and other operations of torch are their own times in its profiler, and attention is the
compiled call of each layer. The rest is Python and what it takes to launch an operation. With
--compiled the layers go through torch.compile (`--compile-decode`). The embedded model at ρ 1.0.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.kernels.cpu import compiled_attention
from tangram.model.load import load_configured
from tangram.types import Request, SamplingParams
from tangram_lab.environment import environment

RESULTS = Path(__file__).parent / "results"
PRODUCTS = ("mm", "addmm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm")
PACKED_PRODUCTS = ("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise")
# Each form of the weights: its dtype and its `--quantization`.
FORMS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}


class TimedAttention:
    """Adds up how long compiled attention takes, as long as it is entered."""

    def __init__(self) -> None:
        self.function: Callable[..., None] = vars(compiled_attention)["step"]
        self.seconds = 0.0

    def __enter__(self) -> None:
        vars(compiled_attention)["step"] = self

    def __exit__(self, *error: object) -> None:
        vars(compiled_attention)["step"] = self.function

    def __call__(self, *arguments: Any) -> None:
        begin = time.perf_counter()
        self.function(*arguments)
        self.seconds += time.perf_counter() - begin


def run_steps(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    steps: int,
    watching: AbstractContextManager[object],
) -> list[float]:
    """Milliseconds of the decode steps behind `prompts`, which run while `watching`."""
    params = SamplingParams.state_all(temperature=0.0, max_tokens=steps + 2, ignore_eos=True)
    begun = set[str]()
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(str(number), prompt, params, lambda event: begun.add(event.request_id))
        )
    while len(begun) < len(prompts):
        engine.step()
    times = []
    with watching:
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(engine: Engine, prompts: list[tuple[int, ...]], steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and of its parts."""
    run_steps(
        engine, prompts, steps, nullcontext()
    )  # what is compiled or allocated at its first use
    attention = TimedAttention()
    wall = run_steps(engine, prompts, steps, attention)
    attention_ms = 1e3 * attention.seconds / len(wall)
    profiled = profile(activities=[ProfilerActivity.CPU])
    count = len(run_steps(engine, prompts, steps, profiled))
    own_ms = {
        event.key: event.self_cpu_time_total / 1e3 / count for event in profiled.key_averages()
    }
    names = {f"aten::{name}" for name in PRODUCTS} | set(PACKED_PRODUCTS)
    products_ms = sum(ms for name, ms in own_ms.items() if name in names)
    others_ms = sum(ms for name, ms in own_ms.items() if name not in names)
    return {"step": wall, "maps": products_ms, "attention": attention_ms, "others": others_ms}


def main() -> None:
    """Measure the forms one after the other, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=["float32", "int4"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--compiled", action="store_true", help="torch.compile the layers")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "cpu_step.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for form in options.forms:
        dtype, quantization = FORMS[form]
        config = EngineConfig(
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
            kv_retention=1.0,
            kv_cache_gib=1.0,
            enable_prefix_caching=False,
            compile_decode=options.compiled,
        )
        loaded = load_configured(config)
        engine = engine_of(config, loaded)
        texts = make_texts(max(options.batches), min_characters=max(1000, 8 * options.context))
        prompts = [tuple(loaded.tokenizer.encode(text)[: options.context]) for text in texts]
        for batch in options.batches:
            taken = measure(engine, prompts[:batch], options.steps)
            rows.append({"form": form, "batch": batch, **taken})
    content = {
        "command": shlex.join(["python", "-m", "bench.cpu_step", *sys.argv[1:]]),
        "options": {name: str(value) for name, value in vars(options).items() if name != "output"},
        "environment": environment(),
        "ms": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """The table of the terminal."""
    table = Table(title="ms of a decode step: median (range)")
    for column in ("form", "batch", "step", "linear maps", "attention", "other operations", "rest"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for row in rows:
        step = statistics.median(row["step"])
        parts = [row[name] for name in ("maps", "attention", "others")]
        table.add_row(
            row["form"],
            str(row["batch"]),
            f"{step:.1f} ({min(row['step']):.1f}-{max(row['step']):.1f})",
            *(f"{part:.1f}" for part in (*parts, step - sum(parts))),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
