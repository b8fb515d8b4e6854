"""Forms of host memory on a CPU: pages in a GiB, and the time to round, pack and unpack a chunk.

The chunk is one of the embedded model at ρ 1.0: 512 tokens in all heads. Times are the median, the
least and the most of `--rounds` runs after one that is not counted.
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

import torch

from bench.render.page import RESULTS
from tangram.cache.layout import Layout
from tangram.config import EngineConfig
from tangram.kernels.offload.host_forms import HOST_FORMS
from tangram.model.load import load_model
from tangram_lab.environment import environment

GIB = 1 << 30
FILE = "host_forms.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / FILE)
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    config, geometry = EngineConfig(), load_model(EngineConfig.model).geometry
    layout = Layout.lay_out_uncompressed(
        geometry,
        chunk_tokens=config.chunk_tokens,
        page_tokens=config.page_tokens,
        heads_per_page=config.heads_per_page,
        max_tokens=geometry.max_positions,
    )
    found = [
        measure(layout, dtype, name, options.rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for name in ("auto", *HOST_FORMS)
    ]
    command = shlex.join(["python", "-m", "bench.host_forms", *given])
    result = {"command": command, "environment": environment(), "forms": found}
    options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for one in found:
        print(one)


def measure(layout: Layout, dtype: torch.dtype, name: str, rounds: int) -> dict[str, Any]:
    """The figures of one form behind a pool of `dtype`."""
    shape = (layout.heads_per_page, 2, layout.page_tokens, layout.geometry.head_dim)
    pages = torch.randn(layout.span_pages, *shape).to(dtype)
    form = HOST_FORMS.get(name)  # type: ignore[call-overload]
    if form is None:
        size = layout.page_bytes(dtype.itemsize)
        actions: dict[str, Callable[[], object]] = {"copy": pages.clone}
    else:
        size = form.page_bytes(2 * layout.page_slots, layout.geometry.head_dim)
        rounded = form.round(pages)
        packed = form.pack(rounded)
        actions = {
            "round": lambda: form.round(pages),
            "pack": lambda: form.pack(rounded),
            "unpack": lambda: form.unpack(packed, pages),
        }
    return {
        "form": name,
        "pool": str(dtype).removeprefix("torch."),
        "page_bytes": size,
        "pages_per_gib": GIB // size,
        "tokens_per_gib": layout.tokens_in(GIB // size, layout.max_tokens),
        "chunk_ms": {action: _time(do, rounds) for action, do in actions.items()},
    }


def _time(do: Callable[[], object], rounds: int) -> dict[str, float]:
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        do()
        times.append(1000 * (time.perf_counter() - begin))
    kept = times[1:]
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept)}


if __name__ == "__main__":
    main()
