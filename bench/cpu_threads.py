"""Linear maps in float32 and the number of threads: `python -m bench.cpu_threads`.

PyTorch multiplies float32 by MKL, which divides some sums between threads. For each map and number
of rows this finds the numbers of threads whose product has other bits than that of one thread, and
the time on one thread. Two processes take turns: one as the engine runs, one with `MKL_CBWR`, under
which MKL promises the same bits. Up to 16 rows it is that of `FewRowsLinear`, as on AMD's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tangram.model.cpu_weights import FewRowsLinear
from tangram_lab.environment import environment

RESULT = Path(__file__).parent / "results" / "cpu_threads.json"
MAPS = ((576, 960), (576, 3072), (1536, 576), (2048, 2048), (4096, 4096))  # inputs, outputs
ROWS = (1, 4, 16, 64, 128, 512)
THREADS = (1, 2, 3, 4, 8)
MODES = {"as the engine runs": {}, "reproducible": {"MKL_CBWR": "AVX512,STRICT"}}
TURNS = {True: 20, False: 4}  # products that are timed, by whether the rows are few


@torch.inference_mode()
def measure() -> list[dict[str, Any]]:
    """Every map with every number of rows, in this process."""
    torch.manual_seed(0)
    cells = []
    for inputs, outputs in MAPS:
        product = FewRowsLinear(nn.Linear(inputs, outputs, bias=False))
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            found = []
            for threads in THREADS:
                torch.set_num_threads(threads)
                found.append(product(x))
            torch.set_num_threads(1)
            seconds = []
            for _ in range(TURNS[rows <= product.most_rows]):
                begin_s = time.thread_time()
                product(x)
                seconds.append(time.thread_time() - begin_s)
            pairs = zip(THREADS, found, strict=True)
            other = [threads for threads, one in pairs if not torch.equal(one, found[0])]
            cells.append(
                {
                    "inputs": inputs,
                    "outputs": outputs,
                    "rows": rows,
                    "other_bits": other,
                    "seconds": min(seconds),
                }
            )
    return cells


def main() -> None:
    """Measure both modes in turns, keep the figures, print a line for each cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
        return
    runs: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
    for _ in range(options.repeats):
        for mode, variables in MODES.items():
            done = subprocess.run(
                [sys.executable, "-m", "bench.cpu_threads", "--child"],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            runs[mode].append(json.loads(done.stdout))
    cells = []
    for number, cell in enumerate(runs["as the engine runs"][0]):
        seconds = {mode: [run[number]["seconds"] for run in each] for mode, each in runs.items()}
        other = {mode: each[0][number]["other_bits"] for mode, each in runs.items()}
        cells.append({**cell, "seconds": seconds, "other_bits": other})
        print(cells[-1])
    content = {
        "command": " ".join(["python -m bench.cpu_threads", *sys.argv[1:]]),
        "environment": environment(),
        "cells": cells,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
