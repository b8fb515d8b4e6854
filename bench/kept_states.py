"""What snapshots of recurrent states cost and bring: `python -m bench.kept_states TRACE`.

The real cache manager admits the prompts of a Mooncake trace one after the other, over pools of
several sizes. Its chunks are the blocks of the trace, 512 tokens. The shape is that of
Qwen3.6-35B-A3B at ρ 0.25: 2.5 MiB of entries a chunk, and 61.9 MiB a state. Nothing is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.prefix import Link
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.errors import ConfigError
from tangram.progress import show_progress
from tangram.types import Geometry
from tangram_lab.load.asks import TRACE_BLOCK, TraceLine, read_lines

GIB = 1 << 30
STATE_BYTES = int(61.9 * (1 << 20))
LAYERS, KV_HEADS, HEAD_DIM, LONGEST = 10, 2, 256, 300_000
PAGE_TOKENS, HEADS_PER_PAGE, KEPT_PAGES = 32, 4, 4


class EveryChunk(CacheManager):
    """Keeps the state behind each chunk."""

    def keeps_state(self, seq: SequenceCache, tokens: int) -> bool:
        """See `CacheManager`."""
        return True


class EveryEighth(CacheManager):
    """Keeps the state behind each eighth chunk, too."""

    def keeps_state(self, seq: SequenceCache, tokens: int) -> bool:
        """See `CacheManager`."""
        return seq.sealed_chunks % 8 == 0 or super().keeps_state(seq, tokens)


class NewestOnly(CacheManager):
    """Keeps the state behind the last chunk of a prompt alone."""

    def keeps_state(self, seq: SequenceCache, tokens: int) -> bool:
        """See `CacheManager`."""
        return seq.sealed_chunks == tokens // self.chunk_tokens


WITHOUT = "no states, as in a model of full attention"
POLICIES = {
    "served": CacheManager,
    "newest only": NewestOnly,
    "every eighth chunk, too": EveryEighth,
    "every chunk": EveryChunk,
    WITHOUT: CacheManager,
}


def make_retention() -> Retention:
    """What the shape keeps of a chunk: 4 of 16 pages of each head."""
    geometry = Geometry(
        LAYERS, KV_HEADS, 8 * KV_HEADS, HEAD_DIM, 248_320, LONGEST, (None,) * LAYERS
    )
    heads = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
    groups = [heads[at : at + HEADS_PER_PAGE] for at in range(0, len(heads), HEADS_PER_PAGE)]
    layout = Layout.build(
        geometry,
        chunk_tokens=TRACE_BLOCK,
        page_tokens=PAGE_TOKENS,
        heads_per_page=HEADS_PER_PAGE,
        max_tokens=LONGEST,
        groups=groups,
        sealed_pages=[KEPT_PAGES] * len(groups),
    )
    return Retention(0.25, layout, "simulated")


def simulate(policy: str, gib: float, lines: Sequence[TraceLine]) -> str:
    """What a pool of `gib` finds of the prompts, what it has lost for want of a state, and what
    states take of it at the end.
    """
    retention = make_retention()
    page_bytes = retention.layout.page_bytes(2)
    cache = POLICIES[policy](
        [retention],
        total_pages=int(gib * GIB) // page_bytes,
        max_sequences=1,
        prefix_caching=True,
        state_pages=0 if policy == WITHOUT else -(-STATE_BYTES // page_bytes),
    )
    found = lost = asked = 0
    for line in show_progress(lines, f"{policy}, {gib:g} GiB"):
        tokens = np.repeat(np.asarray(line.hash_ids, np.int64), TRACE_BLOCK)[: line.input_length]
        seq = cache.admit(ChunkKeys(retention, ""), tokens, len(tokens) + 1)
        if seq is None:
            raise ConfigError(f"a prompt of {len(tokens)} tokens does not fit: raise --gib {gib}")
        asked, found = asked + len(tokens), found + seq.cached_tokens
        lost += max(0, seq.left_chunks * TRACE_BLOCK - seq.cached_tokens)
        while (seq.sealed_chunks + 1) * TRACE_BLOCK <= len(tokens):
            cache.extend(seq, len(tokens) + 1)
            cache.seal(seq)
            cache.take_snapshot(seq, len(tokens))
            cache.commit(seq, tokens)
        cache.take_moves({seq.slot})
        cache.close(seq)
    nodes = cache.prefix.nodes.values()
    states = sum(len(node.pages) for node in nodes if node.link is Link.STATE)
    share = states / (cache.ledger.total - cache.ledger.free)
    return (
        f"{gib:g} GiB, {policy}: found {found / asked:.3f}, lost for want of a state "
        f"{lost / asked:.3f}, states take {share:.2f} of the pages in use"
    )


def main() -> None:
    """Run all policies over pools of --gib."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gib", type=float, nargs="+", default=[40.0, 120.0])
    parser.add_argument("--requests", type=int, default=1 << 30)
    options = parser.parse_args()
    lines = [line for _, line in read_lines(options.trace)][: options.requests]
    for gib in options.gib:
        for policy in POLICIES:
            print(simulate(policy, gib, lines), flush=True)


if __name__ == "__main__":
    main()
