"""Decode without sharing at known lengths: the baseline of all other families.

Batch × context, 32/8 heads, D 128, pages of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from bench.kernels.family import Entry, execute, parser
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case

PLANNERS = ("workqueue", "aot", "plain")
PEERS = ("decode", "decode-static", "batch", "fa3", "sdpa")
BIMODAL = (65536, 3072, 3072, 3072, 65536, 3072, 3072, 3072)
LENGTHS: dict[str, tuple[int, ...]] = {
    "1 × 8K": (8192,),
    "1 × 16K": (16384,),
    "1 × 32K": (32768,),
    "1 × 128K": (131072,),
    "8 × 8K": (8192,) * 8,
    "16 × 32K": (32768,) * 16,
    "64 × 4K": (4096,) * 64,
    "8, bimodal": BIMODAL,
}
TINY_DIVISOR = 256


def make(name: str, lengths: Sequence[int], geometry: BatchGeometry, seed: int, tiny: bool) -> Case:
    """The case of these lengths; tiny: a 256th of them and a few entries, at most 8 rows."""
    if tiny:
        lengths = [length // TINY_DIVISOR + 5 * row + 1 for row, length in enumerate(lengths[:8])]
    return own_case(name, np.asarray(lengths).tolist(), geometry, seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family."""
    options_of = parser(__doc__, PLANNERS, PEERS, page_tokens=16)
    options_of.add_argument("--heads", default="32/8", help="query/KV heads, comma-separated")
    options = options_of.parse_args(arguments)
    if options.quick:
        options.planners = options.planners[:3]
    entries = [
        Entry(
            f"{heads} {name}",
            heads,
            partial(
                make,
                name,
                lengths,
                BatchGeometry.of_heads(heads, options.page_tokens, options.heads_per_page),
                0,
            ),
            {"heads": heads, "batch": len(lengths), "longest": max(lengths)},
        )
        for heads in options.heads.split(",")
        for name, lengths in LENGTHS.items()
    ]
    execute("dense", options, entries)


if __name__ == "__main__":
    main()
