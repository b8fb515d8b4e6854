"""The cost of page accounting on the host, by heads per page (no device).

It has page allocation, table writes and prefix publication, for a batch of rows as a server holds
it, with one profile's heads. It is the time to seal a chunk, of a decode step of the whole batch
within a page and into a new page, and to close a row. Fewer heads a page waste less memory and
write more tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kernels.budgets import SHIPPED, load
from bench.kernels.family import RESULTS
from bench.kernels.fragmentation import HEADS_PER_PAGE
from tangram.cache.accounting import check_accounting
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.compress.profile import Profile
from tangram.types import Geometry, Int64
from tangram_lab.environment import environment

PAGE_TOKENS = 16
STEPS = 64


class CacheUnderTest:
    """`rows` different sequences of `tokens` random tokens, in a pool that holds them all."""

    def __init__(self, profile: Profile, rows: int, tokens: int) -> None:
        model, limit = profile.model, tokens + profile.chunk_tokens
        windows = (None,) * (max(profile.layers) + 1)
        geometry = Geometry(
            len(windows), model.kv_heads, model.query_heads, model.head_dim, 50_000, limit, windows
        )
        layout = Layout.build(
            geometry,
            chunk_tokens=profile.chunk_tokens,
            page_tokens=profile.page_tokens,
            heads_per_page=profile.heads_per_page,
            max_tokens=limit,
            groups=profile.groups,
            sealed_pages=profile.sealed_pages,
        )
        self.retention = Retention(profile.kv_retention, layout, "profile")
        self.cache = CacheManager(
            [self.retention],
            total_pages=rows * layout.most_pages(limit),
            max_sequences=rows,
            prefix_caching=True,
        )
        draw = np.random.default_rng(0)
        self.tokens = [draw.integers(0, 50_000, limit) for _ in range(rows)]
        self.limit, self.sequences = limit, list[SequenceCache]()

    @property
    def layout(self) -> Layout:
        return self.retention.layout

    def fill(self, tokens: int) -> list[float]:
        """Admit every row's prompt; milliseconds of each sealed chunk."""
        times = []
        for own in self.tokens:
            keys = ChunkKeys(self.retention, "")
            seq = self.cache.admit(keys, own[:tokens], self.limit)
            if seq is None:
                raise SystemExit("the pool is too small: nothing is reported")
            self.sequences.append(seq)
            for chunk in range(tokens // self.layout.chunk_tokens):
                times.append(_ms(lambda seq=seq, own=own: self._seal(seq, own)))
                if seq.sealed_chunks != chunk + 1:
                    raise SystemExit("a chunk was not sealed: nothing is reported")
        return times

    def _seal(self, seq: SequenceCache, tokens: Int64) -> None:
        if not self.cache.extend(seq, self.limit):
            raise SystemExit("the pool is too small: nothing is reported")
        self.cache.seal(seq)
        self.cache.commit(seq, tokens)

    def decode(self) -> None:
        """One token of every row."""
        for seq, tokens in zip(self.sequences, self.tokens, strict=True):
            self.cache.grow(seq, 1)
            self.cache.commit(seq, tokens[: seq.computed_tokens])


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure_row(profile: Profile, rows: int, tokens: int) -> dict[str, Any]:
    """One line of the table; page counts are checked at the end."""
    subject = CacheUnderTest(profile, rows, tokens - tokens % profile.chunk_tokens)
    seal = subject.fill(tokens - tokens % profile.chunk_tokens)
    steps = [_ms(subject.decode) for _ in range(STEPS)]
    within = [
        step
        for number, step in enumerate(steps)
        if number % PAGE_TOKENS not in (0, PAGE_TOKENS - 1)
    ]
    check_accounting(subject.cache)
    close = [_ms(lambda seq=seq: subject.cache.close(seq)) for seq in list(subject.sequences)]
    return {
        "heads_per_page": profile.heads_per_page,
        "groups": len(subject.layout.groups),
        "table_entries": int(subject.layout.group_offset[-1]),
        "seal_ms": seal,
        "decode_within_page_ms": within,
        "decode_into_page_ms": steps[::PAGE_TOKENS],
        "close_ms": close,
    }


def main() -> None:
    """Measure, print the table, keep the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default=SHIPPED[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    profiles = [
        load(options.profile, None, page_tokens=PAGE_TOKENS, heads_per_page=heads)
        for heads in HEADS_PER_PAGE
    ]
    lines = [measure_row(profile, options.rows, options.tokens) for profile in profiles]
    timed = ("seal_ms", "decode_within_page_ms", "decode_into_page_ms", "close_ms")
    table = Table(
        title=f"{options.profile}: {options.rows} rows of {options.tokens} tokens; medians on one "
        "thread, ms"
    )
    for column in ("Hp", "groups", "seal a chunk", "decode step", "into new pages", "close a row"):
        table.add_column(column, justify="right")
    for line in lines:
        figures = [f"{statistics.median(line[name]):.3f}" for name in timed]
        table.add_row(str(line["heads_per_page"]), str(line["groups"]), *figures)
    Console(width=120).print(table)
    content = {
        "command": "python -m bench.kernels.tables",
        "environment": environment(),
        "options": {name: str(value) for name, value in vars(options).items() if name != "out"},
        "rows": lines,
    }
    (options.out / "kernels_tables.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
