"""How a sequence keeps its KV entries, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.cache.layout import Layout


@dataclass(frozen=True, eq=False)
class Retention:
    """One way to keep KV entries: the retention ratio ρ, and where the entries lie.

    Each sequence, and each row of its steps, carries one. It is compared by identity. Prefix keys
    begin with `fingerprint`. Chunks that are `scored` when they are sealed keep the first
    `sink_tokens` of the sequence and the last `window_tokens` of the chunk whatever their scores.
    With `one_chunk_a_step` a step takes at most one chunk of a sequence.
    """

    kv_retention: float
    layout: Layout
    fingerprint: str
    scored: bool = False
    sink_tokens: int = 0
    window_tokens: int = 0
    one_chunk_a_step: bool = False
