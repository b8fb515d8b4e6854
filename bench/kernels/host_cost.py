"""Host cost of planning when decoding rows change, and of a step's attention with and without.

Heads keep uneven shares of the context (0.1 to 1.0 of it). Prefixes, for the packing planner, are
of half the context, shared by all rows or by eight groups of rows. Each plan is checked entry by
entry before it is timed.

The process frees one 30 MB array first, as an engine has done. With --fresh it does not. Then every
plan takes new memory from the system, and the figures are printed only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.kernels.budgets import load
from bench.kernels.tables import CacheUnderTest
from tangram.cache.step import Row, RowKind
from tangram.compress.profile import Profile
from tangram.engine.passes.batcher import Batcher
from tangram.engine.passes.device_tables import DeviceTables
from tangram.engine.passes.meters import Meters
from tangram.kernels.interface import KvPool
from tangram.kernels.stopwatch import Stopwatch
from tangram.kernels.triton.card import Card
from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.packing import plan_packing
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram.types import Int32, Int64
from tangram_lab.baselines.uniform import plan_uniform_splits
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.plan_check import check_plan

RESULT = Path(__file__).parents[1] / "results" / "kernels_host_cost.json"
PAGE, CHUNK, WORKERS, GROUP = 32, 2048, 264, 4
H100_PROCESSORS = 132


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """R rows of `chunks` sealed chunks and 100 raw tokens; the span of each (row, chunk)."""

    rows: DecodeRows
    lengths: Int32
    kept_tokens: Int64
    tables: Int32
    spans: Int64

    @classmethod
    def of(cls, count: int, tokens: int, layers: int, heads: int, sharers: int) -> PlannedRows:
        """`sharers` consecutive rows share the first half of their chunks."""
        chunks = tokens // CHUNK
        kept_pages = np.random.default_rng(0).integers(
            CHUNK // PAGE // 10, CHUNK // PAGE + 1, (layers, heads)
        )
        row, chunk = np.ogrid[:count, :chunks]
        spans = np.where(chunk < chunks // 2, row // sharers * sharers, row) * chunks + chunk
        # A head's page ids count up along its table; rows with equal spans have equal ids there.
        width = kept_pages.ravel() * chunks + 12
        offset = np.cumsum(width) - width
        table = np.arange(count)[:, None] * width.sum() + offset
        tables = np.empty(count * width.sum(), np.int32)
        first_page = np.cumsum(count * width) - count * width
        for cell, pages in enumerate(kept_pages.ravel()):
            ids = first_page[cell] + spans[:, :, None] * pages + np.arange(pages)
            own = (
                first_page[cell] + count * chunks * pages + np.arange(count * 12).reshape(count, 12)
            )
            tables[table[:, cell, None] + np.arange(width[cell])] = np.append(
                ids.reshape(count, -1), own, axis=1
            )
        shape = (count, layers, heads)
        rows = DecodeRows.of(
            table.reshape(shape),
            np.zeros(shape, np.int64),
            np.arange(table.size).reshape(shape),
            np.broadcast_to(kept_pages * PAGE * chunks + 100.0, shape),
            (None,) * layers,
            PAGE,
        )
        lengths = np.broadcast_to(kept_pages * PAGE * chunks + 100, shape).astype(np.int32).ravel()
        return cls(rows, lengths, kept_pages * PAGE, tables, spans)

    def forest(self) -> Forest:
        """From the block tables of head 0 in layer 0."""
        count, chunks = self.spans.shape
        sealed = np.full(count, chunks)
        kept = np.full(count, self.kept_tokens[0, 0] // PAGE)
        units, valid = units_of(
            self.tables, self.rows.table[:, 0, 0], kept, sealed, np.full(count, 100 // PAGE)
        )
        return build_forest(units, valid, sealed)


def measure_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each call, sorted, after five warm-up calls.

    It includes freeing the previous result.
    """
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[5:])


def row_of(name: str, call: Callable[[], Any], batch: PlannedRows, repeats: int) -> dict[str, Any]:
    """One line of the table: sizes, median and quartiles."""
    result = call()
    sizes = {}
    if isinstance(result, WorkPlan):
        for grown_tokens in (0, 300):
            lengths = batch.lengths + np.int32(grown_tokens)
            check_plan(result, batch.rows, lengths, batch.tables)
        sizes = {
            "tasks": len(result.tasks),
            "entries": len(result.entries),
            "parts": int((~result.direct).sum()),
        }
    times = measure_ms(call, repeats)
    median, low, high = (float(np.quantile(times, q)) for q in (0.5, 0.25, 0.75))
    return {
        "what": name,
        "cells": batch.rows.table.size,
        **sizes,
        "ms": median,
        "ms_quartiles": [low, high],
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All planners on one batch, then packing on more and less shared ones."""
    shape = options.rows, options.tokens, options.layers, options.heads
    batch = PlannedRows.of(*shape, sharers=1)
    planners = {
        "plain": partial(plan_plain, batch.rows),
        "aot": partial(plan_aot, batch.rows, WORKERS),
        "workqueue": partial(plan_workqueue, batch.rows, batch.lengths, Grain(WORKERS)),
        "workqueue, layer by layer": lambda: [
            plan_workqueue(batch.rows.layer(layer), batch.lengths, Grain(WORKERS))
            for layer in range(options.layers)
        ],
        "uniform splits": partial(plan_uniform_splits, batch.rows, batch.lengths, WORKERS),
    }
    lines = [row_of(name, call, batch, options.repeats) for name, call in planners.items()]
    for sharers in (1, options.rows // 8, options.rows):
        batch = PlannedRows.of(*shape, sharers=max(sharers, 1))
        forest = batch.forest()
        note = f"{sharers} rows share half"
        pack = partial(
            plan_packing,
            batch.rows,
            batch.lengths,
            forest,
            batch.kept_tokens,
            Grain(WORKERS),
            group=GROUP,
            cost=CostModel(),
        )
        lines += [
            row_of(f"forest, {note}", batch.forest, batch, options.repeats),
            row_of(f"packing, {note}", pack, batch, options.repeats),
        ]
    return lines


def step_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The host's work for a decode step's attention, in an engine: the same batch, and new ones.

    A new one is planned, packed for the kernels and uploaded. An upload is a copy in host memory
    here.
    """
    profile = load(
        "qwen3-4b-instruct-2507.keydiff.layer.c2048.r0.25",
        None,
        page_tokens=PAGE,
        heads_per_page=None,
    )
    subject = CacheUnderTest(profile, options.rows, options.tokens)
    subject.fill(options.tokens)
    token = np.zeros(1, np.int64)
    rows = tuple(
        Row(
            str(seq.slot),
            seq.slot,
            subject.retention,
            RowKind.DECODE,
            options.tokens,
            token,
            token[:0],
            True,
        )
        for seq in subject.sequences
    )
    whole, cut = (_launcher(subject, profile, count) for count in (1, H100_PROCESSORS))
    epochs = count()
    lines = []
    for name, launch, epoch in (
        ("a step of the same batch", whole, lambda: 0),
        ("a step of a new batch", whole, lambda: next(epochs)),
        (f"a step of a new batch, {H100_PROCESSORS} processors", cut, lambda: next(epochs)),
    ):
        call = partial(_launch, launch, rows, epoch)
        call()
        times = measure_ms(call, options.repeats)
        median, low, high = (float(np.quantile(times, q)) for q in (0.5, 0.25, 0.75))
        cells = len(rows) * len(profile.layers) * profile.model.kv_heads
        lines.append({"what": name, "cells": cells, "ms": median, "ms_quartiles": [low, high]})
    return lines


Launcher = Callable[[tuple[Row, ...], int], object]


def _launch(launch: Launcher, rows: tuple[Row, ...], epoch: Callable[[], int]) -> None:
    launch(rows, epoch())


def _launcher(subject: CacheUnderTest, profile: Profile, processors: int) -> Launcher:
    """Builds and launches a pass of rows, with plans for a card of so many multiprocessors.

    With few, heads stay whole.
    """
    from tangram.kernels.triton.triton_kernels import TritonKernels

    model, cache = profile.model, subject.cache
    pool = torch.empty(1, profile.heads_per_page, 2, PAGE, model.head_dim, dtype=torch.float16)
    card = replace(Card.of(pool.device), processors=processors)
    group = model.query_heads // model.kv_heads
    kernels = TritonKernels(KvPool(pool, group, len(profile.layers), model.kv_heads), card=card)
    batcher = Batcher([subject.retention], kernels, cache, Meters(Stopwatch(pool.device)))
    tables = DeviceTables(cache, pool.device)

    def launch(rows: tuple[Row, ...], epoch: int) -> object:
        return kernels.launch(batcher.build(rows, epoch).addresses, tables.flat())

    return launch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "rows": 64,
        "tokens": 65536,
        "layers": 36,
        "heads": 8,
        "repeats": 50,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--fresh", action="store_true", help="leave glibc's allocator as a new process has it"
    )
    options = parser.parse_args()
    where = {**environment(), "numpy": version("numpy")}
    if not options.fresh:
        # Once a process has freed a larger array, glibc keeps freed memory, and plans take none
        # anew.
        np.ones(30 << 20, np.uint8).sum()
    lines = step_rows(options) + measure(options)
    table = Table(
        "planner",
        "cells",
        "tasks",
        "row entries",
        "ms, median",
        "quartiles",
        title=f"{where['cpu']}, 1 thread",
    )
    for line in lines:
        low, high = line["ms_quartiles"]
        counts = (str(line.get(key, "")) for key in ("cells", "tasks", "entries"))
        table.add_row(line["what"], *counts, f"{line['ms']:.2f}", f"{low:.2f}–{high:.2f}")
    Console().print(table)
    result = {
        "command": "python -m bench.kernels.host_cost",
        "options": vars(options),
        "environment": where,
        "rows": lines,
    }
    if not options.fresh:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
