"""Linear maps of the embedded model by the number of rows: `python -m bench.cpu_products`.

All maps of the model run once for each time, so that no weight stays in a cache. `linear` is
PyTorch's product in float32, `few rows` that of `tangram/model/cpu_weights.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tangram.model.cpu_weights import FewRowsLinear
from tangram.model.load import load_model
from tangram_lab.environment import environment

RESULT = Path(__file__).parent / "results" / "cpu_products.json"
ROWS = (1, 2, 3, 4, 8, 16)


@torch.inference_mode()
def main() -> None:
    """Measure both products in turns, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model = load_model("smollm2", device="cpu", dtype="float32").model
    maps = [part for part in model.modules() if type(part) is nn.Linear]
    products = {"linear": maps, "few rows": [FewRowsLinear(part) for part in maps]}
    times: dict[str, dict[int, list[float]]] = {
        name: {rows: [] for rows in ROWS} for name in products
    }
    for repeat in range(options.repeats + 1):  # the first one warms up
        for rows in ROWS:
            for name, parts in products.items():
                taken = _time(parts, rows)
                if repeat:
                    times[name][rows].append(taken)
    table = Table(title="ms for all linear maps: median (range)")
    for column in ("rows", *products):
        table.add_column(column, justify="right")
    for rows in ROWS:
        table.add_row(str(rows), *(_cell(times[name][rows]) for name in products))
    Console(width=100).print(table)
    content = {
        "command": f"python -m bench.cpu_products --repeats {options.repeats}",
        "environment": environment(),
        "seconds": times,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def _time(parts: list[Any], rows: int) -> float:
    inputs = {width: torch.randn(rows, width) for width in {part.weight.shape[1] for part in parts}}
    begin_s = time.perf_counter()
    for part in parts:
        part(inputs[part.weight.shape[1]])
    return time.perf_counter() - begin_s


def _cell(seconds: list[float]) -> str:
    ms = [1e3 * value for value in seconds]
    return f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"


if __name__ == "__main__":
    main()
