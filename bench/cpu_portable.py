"""Decode attention with and without vector code of its own: `python -m bench.cpu_portable`.

Two processes take turns. One of them acts as on arm64; each has its own cache. A step is that of
one layer, with heads as SmolLM2-135M has them; its pages are not in the processor's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tangram_lab.environment import environment

RESULT = Path(__file__).parent / "results" / "cpu_portable.json"
STEPS = 40
# Rows, tokens of each
BATCHES = ((1, 2000), (8, 2000))
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
KV_HEADS, GROUP, HEAD_DIM, PAGE = 3, 3, 64, 16
LAYERS = 30  # as many pools take turns
MACHINES = {"vectors": "x86_64", "portable": "arm64"}


def time_steps(rows: int, tokens: int, dtype: str) -> list[float]:
    """Microseconds of STEPS decode steps of a layer."""
    from tangram.kernels import cpu
    from tangram.kernels.narrow import as_entries
    from tangram.plan.aot import plan_aot
    from tangram.plan.form import DecodeRows

    pages = -(-tokens // PAGE)
    cells = np.arange(rows * KV_HEADS).reshape(rows, 1, KV_HEADS)
    kept = np.full((rows, 1, KV_HEADS), float(tokens))
    batch = DecodeRows.of(
        cells * pages, np.zeros_like(cells), cells, kept, windows=(None,), page_tokens=PAGE
    )
    plan = cpu.CpuPlan.build(plan_aot(batch, 2, tile_tokens=128), batch)
    pool = as_entries(torch.randn(cells.size * pages, 1, 2, PAGE, HEAD_DIM), getattr(torch, dtype))
    pools = [pool.clone() for _ in range(LAYERS)]
    tables = torch.randperm(cells.size * pages).int()
    lengths = torch.full((cells.size,), tokens, dtype=torch.int32)
    q = torch.randn(rows, KV_HEADS * GROUP, HEAD_DIM)
    k, v = torch.randn(2, rows, KV_HEADS, HEAD_DIM)
    times = list[float]()
    for step in range(STEPS + 5):
        started = time.perf_counter()
        cpu.decode_step(q, k, v, pools[step % LAYERS], tables, lengths, plan, 0, scaling=0.125)
        times.append(1e6 * (time.perf_counter() - started))
    return times[5:]


def time_cases(machine: str) -> list[list[float]]:
    """The times of all cases as on `machine`, in this process, which has not loaded kernels yet."""
    import numba  # noqa: F401  # torch and Numba may ask for themselves

    platform.machine = lambda: machine
    return [time_steps(*batch, dtype) for dtype in DTYPES for batch in BATCHES]


def main() -> None:
    """Measure both forms in turns, keep the times, print medians and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forms", default=",".join(MACHINES), help="comma-separated")
    parser.add_argument("--threads", type=int, help="as many as torch takes")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    parser.add_argument("--as-on", choices=tuple(MACHINES.values()), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_on:
        print(json.dumps(time_cases(options.as_on)))
        return
    forms = {form: MACHINES[form] for form in options.forms.split(",")}
    limits = dict[str, str]()
    if options.threads is not None:
        limits = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(options.threads))
    cases = [(dtype, rows, tokens) for dtype in DTYPES for rows, tokens in BATCHES]
    found: list[dict[str, Any]] = [
        {"dtype": dtype, "rows": rows, "tokens": tokens, "us": {form: [] for form in forms}}
        for dtype, rows, tokens in cases
    ]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            for form, machine in forms.items():
                done = subprocess.run(
                    [sys.executable, "-m", "bench.cpu_portable", "--as-on", machine],
                    env=os.environ | limits | {"NUMBA_CACHE_DIR": str(Path(folder) / machine)},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                for case, times in zip(found, json.loads(done.stdout), strict=True):
                    case["us"][form].append(statistics.median(times))
    content = {
        "command": " ".join(["python -m bench.cpu_portable", *sys.argv[1:]]),
        "environment": environment(),
        "cases": found,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    for case in found:
        medians = {form: round(statistics.median(times)) for form, times in case["us"].items()}
        print(f"{case['dtype']} {case['rows']} x {case['tokens']}, µs: {medians}")


if __name__ == "__main__":
    main()
