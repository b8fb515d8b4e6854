"""What the engine counts. The server turns it into Prometheus series, the demo and the benchmarks read it as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """One consistent reading of the engine's books, taken between two steps.

    Gauges: `running` and `waiting` requests; pages of the one pool, where `pages_total` = `pages_held` (by running
    requests) + `pages_cached` (kept for reuse, evictable) + `pages_free`; `kv_bytes_held` is what the running requests'
    pages occupy, a page counted for each request that holds it, and `kv_bytes_uncompressed` what the same tokens would
    occupy with nothing dropped; `kv_token_bytes` is one uncompressed token over all layers.
    `capacity_tokens` is the tokens the pool holds at the default retention ratio and
    `capacity_uncompressed_tokens` what it would hold at 1.0.

    Counters since the start: the others. `cached_tokens` are prompt tokens that were served from the prefix cache.
    """

    running: int
    waiting: int
    pages_total: int
    pages_held: int
    pages_cached: int
    pages_free: int
    capacity_tokens: int
    capacity_uncompressed_tokens: int
    kv_token_bytes: int
    kv_bytes_held: int
    kv_bytes_uncompressed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    sealed_chunks: int

    @property
    def retained_tokens(self) -> float:
        """The KV entries of the running requests, in whole tokens of an uncompressed cache."""
        return self.kv_bytes_held / self.kv_token_bytes

    @property
    def represented_tokens(self) -> float:
        """The tokens those entries stand for: what an uncompressed cache would have to hold."""
        return self.kv_bytes_uncompressed / self.kv_token_bytes
