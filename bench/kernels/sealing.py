"""The cost of sealing beside the prefill of the same chunk, in one layer, on the GPU.

The layer is of Llama-3.1-8B: attention of the chunk over its past (Tangram's kernel), the layer's
matrix products (cuBLAS), and sealing. Sealing is KeyDiff's scores in two launches, then selection,
gathering and packing in one kernel. It is checked before it is timed: the pool must hold exactly
what the torch specification keeps, and the scores must be the scorer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.kernels.family import NO_DEVICE, RESULTS
from tangram.compress.scorers.base import ChunkView
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.compress.select import keep, protect
from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton.stored import LayerRows, StoredPool
from tangram.model.sealing import ChunkRanking
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.timing import ColdCache

HEADS, GROUP, DIM, PAGE, HIDDEN, INNER = 8, 4, 128, 16, 4096, 14336
SINKS, REPLAYS = 4, 30


def median_us(call: Callable[[], Any], cold: ColdCache) -> tuple[float, float, float]:
    """Median, least and most microseconds of a captured call with a cold L2."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.flush()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times), min(times), max(times)


class Layer:
    """Random activations and weights of one layer, and a pool that holds its past."""

    def __init__(self, chunk: int, past: int, retention: float, device: torch.device) -> None:
        self.chunk, self.past = chunk, past
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.q = torch.randn(chunk, HEADS * GROUP, DIM, **options)
        self.k, self.v = (torch.randn(chunk, HEADS, DIM, **options) for _ in range(2))
        self.hidden = torch.randn(chunk, HIDDEN, **options)
        shapes = (
            (HIDDEN, (HEADS * GROUP + 2 * HEADS) * DIM),
            (HEADS * GROUP * DIM, HIDDEN),
            (HIDDEN, 2 * INNER),
            (INNER, HIDDEN),
        )
        self.weights = [torch.randn(*shape, **options) / shape[0] ** 0.5 for shape in shapes]
        pages = (past + chunk) // PAGE
        self.pool = torch.randn(pages * HEADS, 1, 2, PAGE, DIM, **options)
        self.tables = torch.randperm(pages * HEADS, device=device).to(torch.int32)
        budgets = torch.rand(HEADS, generator=torch.Generator().manual_seed(0)) + 0.2
        kept = (budgets / budgets.mean() * retention * chunk / PAGE).clamp(
            3, chunk / PAGE
        ).int() * PAGE
        self.kept = kept.to(device)
        heads = torch.arange(HEADS, dtype=torch.int32) * pages
        columns = [
            heads,
            torch.zeros(HEADS, dtype=torch.int32),
            torch.full((HEADS,), past, dtype=torch.int32),
        ]
        self.address = torch.stack(columns, dim=1).to(device)
        self.spans = torch.tensor([[0, chunk, 0, chunk, past]], dtype=torch.int32, device=device)
        self.order = torch.arange(HEADS, dtype=torch.int32, device=device)
        self.window = chunk // 64
        self.stored = StoredPool.of(self.pool)
        self.rows = LayerRows(0, self.tables, self.address[None], self.spans, chunk, chunk)

    def attend(self) -> Tensor:
        from tangram.kernels.triton import prefill

        rule = AttentionRule(DIM**-0.5)
        return prefill.prefill(self.q, self.k, self.v, self.stored, self.rows, self.order, rule)

    def multiply(self) -> Tensor:
        qkv, out, up, down = self.weights
        first = (self.hidden @ qkv)[:, : HEADS * GROUP * DIM] @ out
        gate, value = (first @ up).chunk(2, dim=-1)
        multiplied: Tensor = (gate * value) @ down
        return multiplied

    def scores(self) -> Tensor:
        from tangram.kernels.triton import keydiff

        return keydiff.score(self.k.transpose(0, 1)[None])

    def seal(self, scores: Tensor) -> None:
        from tangram.kernels.triton import store

        ranking = ChunkRanking(scores, SINKS, self.window)
        store.seal(ranking, self.k, self.v, self.stored, self.rows, self.kept[None])

    def check(self) -> None:
        """Raise unless scores are the scorer's and sealing stores exactly what the specification
        keeps.
        """
        views = (x.transpose(0, 1) for x in (self.q, self.k, self.v))
        scores = self.scores()
        torch.testing.assert_close(
            scores[0],
            KeyDiff().score(ChunkView(*views, start=self.past, layer=0, scaling=DIM**-0.5)),
            rtol=1e-4,
            atol=1e-5,
        )
        self.seal(scores)
        best = keep(protect(scores[0], self.past, SINKS, self.window), self.kept.tolist())
        for head, positions in enumerate(best):
            first = int(self.address[head, 0]) + self.past // PAGE
            pages = self.tables[first : first + len(positions) // PAGE].long()
            for half, source in enumerate((self.k, self.v)):
                stored = self.pool[pages, 0, half].reshape(-1, DIM)
                if not torch.equal(stored, source[positions, head]):
                    raise SystemExit(
                        f"sealing differs from the specification in head {head}: nothing is "
                        "reported"
                    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, keep the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--past-tokens", default="0,8192,32768")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda")
    cold, rows = ColdCache(device), []
    for past in map(int, options.past_tokens.split(",")):
        layer = Layer(options.chunk_tokens, past, options.retention, device)
        layer.check()
        scores = layer.scores()
        parts: dict[str, Callable[[], Any]] = {
            "attention": layer.attend,
            "products": layer.multiply,
            "scores": layer.scores,
            "seal": lambda layer=layer, scores=scores: layer.seal(scores),
        }
        row: dict[str, Any] = {name: median_us(call, cold) for name, call in parts.items()}
        prefill_us = row["attention"][0] + row["products"][0]
        row |= {"past_tokens": past, "share": (row["scores"][0] + row["seal"][0]) / prefill_us}
        rows.append(row)
    report(rows, options)


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table and keep the raw figures."""
    title = (
        f"one layer of Llama-3.1-8B, chunk of {options.chunk_tokens}, bfloat16: µs, cold L2, "
        f"median of {REPLAYS}"
    )
    table = Table(title=title)
    for column in ("past tokens", "attention", "products", "scores", "seal", "sealing / prefill"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{row[name][0]:.1f}" for name in ("attention", "products", "scores", "seal")]
        table.add_row(f"{row['past_tokens']:,}", *figures, f"{row['share']:.1%}")
    Console(width=120).print(table)
    content = {
        "command": "python -m bench.kernels.sealing",
        "environment": environment(),
        "rows": rows,
        "options": {name: str(value) for name, value in vars(options).items() if name != "out"},
    }
    (options.out / "kernels_sealing.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
