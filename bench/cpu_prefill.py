"""Attention of prefill on a CPU, compiled and by torch: `python -m bench.cpu_prefill`.

One layer of the embedded model's shape, in turns, in CPU seconds of one thread: other programs on
the machine change them less than a clock's. GFLOP/s count what a causal mask leaves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from tangram.kernels import reference
from tangram.kernels.cpu import compiled_attention
from tangram.kernels.interface import AttentionRule

ROWS = ((512, 0), (512, 2500), (30, 2500))  # queries, past entries
HEADS, GROUP, DIM, PAGE, SCALING = 3, 3, 64, 16, 0.125


def attentions(
    dtype: torch.dtype, queries: int, past: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """The attention of one row by both kernels."""
    torch.manual_seed(0)
    q = torch.randn(queries, HEADS * GROUP, DIM).to(dtype)
    k, v = torch.randn(2, queries, HEADS, DIM).to(dtype)
    pages = -(-past // PAGE)
    pool = torch.randn(HEADS * pages + 1, 1, 2, PAGE, DIM).to(dtype)
    tables = torch.randperm(len(pool)).int()
    address = np.array([[[head * pages, 0, past] for head in range(HEADS)]], np.int32)
    spans, out = np.array([[0, queries, 0, queries, past]], np.int32), torch.empty_like(q)

    def run_compiled() -> torch.Tensor:
        compiled_attention.prefill(
            q, k, v, out, pool, tables, address, spans, AttentionRule(SCALING)
        )
        return out

    def run_torch() -> torch.Tensor:
        return reference.prefill(
            q, k, v, pool, tables, (*address[0].T,), AttentionRule(SCALING), past_tokens=past
        )

    return {"torch": run_torch, "compiled": run_compiled}


def main() -> None:
    """Print the best of `--repeats`, and the median of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for queries, past in ROWS:
            kernels = attentions(dtype, queries, past)
            first, second = (run().float() for run in kernels.values())
            torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)
            seconds: dict[str, list[float]] = {name: [] for name in kernels}
            for _ in range(options.repeats):
                for name, run in kernels.items():
                    begin = time.process_time()
                    run()
                    seconds[name].append(time.process_time() - begin)
            work = 4e-9 * HEADS * GROUP * DIM * (queries * past + queries * (queries + 1) / 2)
            for name, found in seconds.items():
                print(
                    f"{dtype} {queries} after {past}, {name}: {1e3 * min(found):.2f} ms "
                    f"(median {1e3 * float(np.median(found)):.2f}), {work / min(found):.0f} GFLOP/s"
                )


if __name__ == "__main__":
    main()
