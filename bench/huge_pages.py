"""Decode on a CPU with the KV pool in huge memory pages and without: `python -m bench.huge_pages`.

Two engines of the embedded model at ρ 1.0 in one process, in turns. A first run writes to a pool
that nothing has touched, so its prompts say what the first use costs. Later runs find these cached,
and only decode is timed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.cpu_step import TimedAttention, run_steps
from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.kernels.pool_memory import allocate_pool
from tangram.model.load import LoadedModel, load_configured
from tangram_lab.environment import environment

RESULT = Path(__file__).parent / "results" / "huge_pages.json"
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def allocate_plainly(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `allocate_pool`, in memory pages of 4 KiB."""
    return torch.empty(shape, dtype=dtype, device=device)


FORMS: dict[str, Allocate] = {"4 KiB": allocate_plainly, "huge": allocate_pool}


def build(config: EngineConfig, loaded: LoadedModel, allocate: Allocate) -> Engine:
    """An engine whose pool `allocate` makes."""
    with patch("tangram.engine.passes.runner.allocate_pool", allocate):
        return engine_of(config, loaded)


def measure(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """The figures of each form in `dtype`."""
    config = EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        kv_retention=1.0,
        kv_cache_gib=options.kv_cache_gib,
    )
    loaded = load_configured(config)
    texts = make_texts(options.batch, min_characters=8 * options.context)
    prompts = [tuple(loaded.tokenizer.encode(text)[: options.context]) for text in texts]
    engines = {name: build(config, loaded, allocate) for name, allocate in FORMS.items()}
    rows: list[dict[str, Any]] = [
        {"dtype": dtype, "pages": name, "first_s": 0.0, "step_ms": [], "attention_ms": []}
        for name in FORMS
    ]
    for row, engine in zip(rows, engines.values(), strict=True):
        begin = time.perf_counter()
        run_steps(engine, prompts, 1, TimedAttention())
        row["first_s"] = time.perf_counter() - begin
    for _ in range(options.repeats):
        for row, engine in zip(rows, engines.values(), strict=True):
            attention = TimedAttention()
            steps = run_steps(engine, prompts, options.steps, attention)
            row["step_ms"].append(statistics.median(steps))
            row["attention_ms"].append(1e3 * attention.seconds / len(steps))
    return rows


def main() -> None:
    """Measure, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = [row for dtype in options.dtypes for row in measure(options, dtype)]
    content = {
        "command": shlex.join(["python", "-m", "bench.huge_pages", *sys.argv[1:]]),
        "options": {name: str(value) for name, value in vars(options).items() if name != "output"},
        "environment": environment(),
        "rows": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    table = Table("dtype", "pages", "first prompts s", "step ms", "attention ms")
    for row in rows:
        spans = [
            f"{statistics.median(row[name]):.1f} ({min(row[name]):.1f}–{max(row[name]):.1f})"
            for name in ("step_ms", "attention_ms")
        ]
        table.add_row(row["dtype"], row["pages"], f"{row['first_s']:.1f}", *spans)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
