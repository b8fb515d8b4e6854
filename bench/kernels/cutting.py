"""How finely long rows are cut: decode, and verification of drafts, by tasks a multiprocessor.

Rows share nothing, and each reads all its entries. A schedule without a number is the one that
serves: it cuts rows finer where tasks stay long (`plan/workqueue.py`). All schedules must give the
answer of the first before anything is timed. `--small` checks tiny loads without a timer, also in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.kernels.family import NO_DEVICE, RESULTS
from bench.kernels.sealing import REPLAYS, median_us
from tangram.kernels.interface import AttentionRule
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest
from tangram.plan.form import DecodeRows
from tangram.plan.schedule import Decoding
from tangram.types import Int32
from tangram_lab.baselines.compared_schedules import parse_schedule
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.timing import (
    LARGEST_ERROR,
    ColdCache,
    WrongAnswer,
    relative_error,
)

PAGE = 16
SERVING = "workqueue"
SCHEDULES = (SERVING, *(f"{SERVING}+ctas={count}" for count in (3, 5, 6, 8, 10, 12, 16)))


@dataclass(frozen=True)
class Load:
    """`rows` of `tokens` entries in each of `layers` and H KV heads of G query heads; each row has
    `queries` tokens.
    """

    name: str
    rows: int
    tokens: int
    queries: int
    layers: int = 4
    heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def lengths(self) -> Int32:
        """int32 [R · L · H], flat."""
        return np.full(self.rows * self.layers * self.heads, self.tokens, np.int32)


LOADS = tuple(
    Load(name, *shape, queries)
    for name, shape in (
        ("40 × 16K", (40, 16384)),
        ("24 × 8K", (24, 8192)),
        ("16 × 32K", (16, 32768)),
        ("1 × 128K", (1, 131072)),
        ("128 × 2K", (128, 2048)),
        ("8 × 1K", (8, 1024)),
    )
    for queries in (1, 8)
)


SMALL = (
    Load("1 × 40000", 1, 40000, 1, layers=1, heads=1, group=2, head_dim=16),
    Load("2 × 100", 2, 100, 2, layers=2, heads=1, group=2, head_dim=16),
)


class LongRows:
    """Random queries and entries of a load, on pages in random order."""

    def __init__(self, load: Load, device: torch.device, dtype: torch.dtype) -> None:
        self._load, self._lengths = load, load.lengths
        shape = load.rows, load.layers, load.heads
        pages = -(-load.tokens // PAGE)
        cells = np.arange(len(self._lengths)).reshape(shape)
        self._rows = DecodeRows.of(
            cells * pages,
            np.zeros_like(cells),
            cells,
            self._lengths.reshape(shape).astype(np.float64),
            (None,) * load.layers,
            PAGE,
        )
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._pool = torch.empty(cells.size * pages, 1, 2, PAGE, load.head_dim, **options).normal_()
        self._tables = torch.randperm(cells.size * pages, device=device).to(torch.int32)
        tokens = load.rows * load.queries
        self._q = torch.randn(tokens, load.heads * load.group, load.head_dim, **options)
        self._first = torch.arange(0, tokens + 1, load.queries, device=device, dtype=torch.int32)
        self._device_lengths = torch.from_numpy(self._lengths).to(device)
        self.layer_bytes = self._pool.nbytes // load.layers

    def decoder(self, text: str, multiprocessors: int) -> Any:
        """The kernels with a plan of the schedule `text`, and how many tasks a layer has."""
        from tangram.kernels.triton.decode_launch import GpuDecode
        from tangram.kernels.triton.stored import StoredPool

        load, schedule = self._load, parse_schedule(text)
        batch = Decoding(
            self._rows,
            self._lengths,
            load.group,
            np.zeros((load.rows, load.layers, load.heads), np.int64),
            _share_nothing,
            load.queries,
        )
        plan = schedule.plan(batch, multiprocessors, CostModel())
        decoder = GpuDecode(
            plan,
            StoredPool.of(self._pool),
            load.group,
            lengths=self._lengths,
            options=schedule.options(),
            queries=load.queries,
        )
        return decoder, len(plan.task_layer) // load.layers

    def attend(self, decoder: Any) -> Tensor:
        """All layers, one after the other; the answer of the last."""
        first = self._first if self._load.queries > 1 else None
        rule = AttentionRule(self._load.head_dim**-0.5)
        for layer in range(self._load.layers):
            out = decoder.attend(
                layer, self._q, self._tables, self._device_lengths, rule, first_tokens=first
            )
        found: Tensor = out
        return found


def _share_nothing() -> Forest:
    raise ValueError("the work queue asks for no prefixes")


def measure(load: Load, schedules: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Tasks and µs of a layer by schedule, checked against the first; no times off a GPU."""
    timed = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if timed else 3
    batch = LongRows(load, device, torch.bfloat16 if timed else torch.float32)
    cells: dict[str, dict[str, Any]] = {}
    expected: Tensor | None = None
    for text in schedules:
        decoder, tasks = batch.decoder(text, processors)
        answer = batch.attend(decoder).float()
        expected = answer if expected is None else expected
        error = relative_error(answer, expected)
        if error > LARGEST_ERROR:
            raise WrongAnswer(f"{load.name}, {text}: differs from {schedules[0]} by {error:.3g}")
        cells[text] = {"tasks": tasks, "error": error}
        if timed:
            times = median_us(partial(batch.attend, decoder), ColdCache(device))
            cells[text]["us"] = [one / load.layers for one in times]
    return {"load": load.name, "queries": load.queries, "bytes": batch.layer_bytes, "cells": cells}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, keep the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny loads, checked and not timed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.small:
        for load in SMALL:
            found = measure(load, SCHEDULES[:2], torch.device("cpu"))
            print(load.name, {text: cell["tasks"] for text, cell in found["cells"].items()})
        return
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    rows = [measure(load, SCHEDULES, torch.device("cuda")) for load in LOADS]
    report(rows)
    content = {
        "command": "python -m bench.kernels.cutting",
        "environment": environment(),
        "replays": REPLAYS,
        "rows": rows,
    }
    (options.out / "kernels_cutting.json").write_text(json.dumps(content, indent=1) + "\n")


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table: µs of a layer and tasks, a column a schedule."""
    table = Table(title=f"µs of a layer (tasks), cold L2, median of {REPLAYS}")
    for column in ("load", "tokens a row", *SCHEDULES):
        table.add_column(column.removeprefix(f"{SERVING}+"), justify="right")
    for row in rows:
        figures = [f"{one['us'][0]:.0f} ({one['tasks']})" for one in row["cells"].values()]
        table.add_row(row["load"], str(row["queries"]), *figures)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
