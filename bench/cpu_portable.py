"""Decode with and without intrinsics on this CPU: `python -m bench.cpu_portable`.

Two processes take turns. One of them acts as on arm64; each has its own cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS, STEPS = 5, 40
# Rows, tokens of each: heads as SmolLM2-135M has them in one layer
BATCHES = ((1, 2000), (8, 2000))
KV_HEADS, GROUP, HEAD_DIM, PAGE = 3, 3, 64, 16


def microseconds(rows: int, tokens: int) -> float:
    """The median of STEPS decode steps of a layer."""
    import numpy as np
    import torch

    from tangram.kernels import cpu
    from tangram.plan.aot import plan_aot
    from tangram.plan.form import DecodeRows

    pages = -(-tokens // PAGE)
    cells = np.arange(rows * KV_HEADS).reshape(rows, 1, KV_HEADS)
    kept = np.full((rows, 1, KV_HEADS), float(tokens))
    batch = DecodeRows.of(
        cells * pages, np.zeros_like(cells), cells, kept, windows=(None,), page_tokens=PAGE
    )
    plan = cpu.CpuPlan.build(plan_aot(batch, 2, tile_tokens=128), batch)
    pool = torch.randn(cells.size * pages, 1, 2, PAGE, HEAD_DIM)
    tables = torch.randperm(cells.size * pages).int()
    lengths = torch.full((cells.size,), tokens, dtype=torch.int32)
    q = torch.randn(rows, KV_HEADS * GROUP, HEAD_DIM)
    k, v = torch.randn(2, rows, KV_HEADS, HEAD_DIM)
    times = list[float]()
    for _ in range(STEPS + 5):
        started = time.perf_counter()
        cpu.decode_step(q, k, v, pool, tables, lengths, plan, 0, scaling=0.125)
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[5:])


def main() -> None:
    """Print both, and the ratio of the portable form's time."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            for machine in ("x86_64", "arm64"):
                cache = str(Path(folder) / machine)
                command = [sys.executable, "-m", "bench.cpu_portable", machine]
                result = subprocess.run(
                    command,
                    env=os.environ | {"NUMBA_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                for (rows, _), line in zip(BATCHES, result.stdout.splitlines(), strict=True):
                    found.setdefault((machine, rows), []).append(float(line))
    for rows, tokens in BATCHES:
        own, portable = (sorted(found[machine, rows]) for machine in ("x86_64", "arm64"))
        ratio = statistics.median(portable) / statistics.median(own)
        print(
            f"{rows} x {tokens}: intrinsics {statistics.median(own):.0f} "
            f"({own[0]:.0f}–{own[-1]:.0f}) µs, portable {statistics.median(portable):.0f} "
            f"({portable[0]:.0f}–{portable[-1]:.0f}) µs, {ratio:.2f}"
        )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        import platform

        import numba  # noqa: F401  # asks for itself
        import torch  # noqa: F401

        platform.machine = lambda: sys.argv[1]
        for rows, tokens in BATCHES:
            print(microseconds(rows, tokens))
    else:
        main()
