"""What the engine counts. The server turns it into Prometheus series, the demo and the benchmarks
read it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupOverflow:
    """What the sampled chunks of one ρ wished of one head group: `chunks` were looked at since the
    start.

    `wished` entries is what their own scores would have kept of the group's heads, `lost` those of
    them that the budgets had no room for, `exceeded` how often a head lacked some, of `chunks`
    times the group's heads.
    """

    kv_retention: float
    group: int
    chunks: int
    wished: int
    lost: int
    exceeded: int


@dataclass(frozen=True)
class EngineStats:
    """One consistent reading of the engine's books, taken between two steps.

    Gauges: `running` and `waiting` requests; pages of the one pool, where `pages_total` =
    `pages_held` (by running requests) + `pages_cached` (kept for reuse, evictable) + `pages_free`,
    and `pages_promised` of the cached and free ones are reserved for running requests;
    `kv_bytes_held` is what the running requests' pages occupy, a page counted for each request that
    holds it, and `kv_bytes_uncompressed` what the same tokens would occupy with nothing dropped;
    `slots_held` are the entries that fit into those pages and `slots_used` those that are there;
    `kv_token_bytes` is one uncompressed token over all layers, in `cache_dtype`, `page_bytes` a
    page. `capacity_tokens` is the tokens the pool holds at the default retention ratio and
    `capacity_uncompressed_tokens` what it would hold at 1.0; `host_pages_used` of
    `host_pages_total` pages of host memory keep links of the prefix cache.

    Counters since the start: the others. `prompt_tokens` and `cached_tokens`, those of them that
    were served from the prefix cache, count when a request is admitted, `computed_prompt_tokens`
    step by step, recomputed ones again; `restored_tokens` those of chunks that were copied back
    from host memory. `host_bytes_out` and `host_bytes_in` were copied there and back.
    `dropped_spans` are links (chunks, window parts) that host memory had to let go or found no room
    for; without any, all that are evicted. `step_s` are the seconds of the engine's steps,
    `device_s` those in which the host waited for the device (on a CPU: ran the model), `sealing_s`
    the device's for scoring, selecting and storing chunks. `plans` counts decode plans by planner.
    `overflow` has a line a head group where it is measured.
    """

    running: int
    waiting: int
    pages_total: int
    pages_held: int
    pages_cached: int
    pages_free: int
    pages_promised: int
    slots_held: int
    slots_used: int
    capacity_tokens: int
    capacity_uncompressed_tokens: int
    cache_dtype: str
    page_bytes: int
    kv_token_bytes: int
    kv_bytes_held: int
    kv_bytes_uncompressed: int
    prompt_tokens: int
    cached_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    sealed_chunks: int
    host_pages_total: int
    host_pages_used: int
    restored_tokens: int
    host_bytes_out: int
    host_bytes_in: int
    dropped_spans: int
    step_s: float
    device_s: float
    sealing_s: float
    plans: Mapping[str, int]
    overflow: tuple[GroupOverflow, ...]

    @property
    def pool_bytes(self) -> int:
        """The pool."""
        return self.pages_total * self.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        """The host memory behind it."""
        return self.host_pages_total * self.page_bytes

    @property
    def retained_tokens(self) -> float:
        """The KV entries of the running requests, in whole tokens of an uncompressed cache."""
        return self.kv_bytes_held / self.kv_token_bytes

    @property
    def represented_tokens(self) -> float:
        """The tokens those entries stand for: what an uncompressed cache would have to hold."""
        return self.kv_bytes_uncompressed / self.kv_token_bytes

    @property
    def bytes_saved(self) -> int:
        """What compression saves the running requests; below 0 where ends of pages cost more than
        it saves.
        """
        return self.kv_bytes_uncompressed - self.kv_bytes_held

    @property
    def slots_empty(self) -> int:
        """Fragmentation: the slots of the running requests' pages that hold nothing."""
        return self.slots_held - self.slots_used

    @property
    def hit_share(self) -> float:
        """The share of all prompt tokens so far that the prefix cache had; 0 before the first."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def host_share(self) -> float:
        """The share of the engine's steps so far that was the host's own work; 0 before
        the first.
        """
        return 1 - self.device_s / self.step_s if self.step_s else 0.0
