"""The engine's statistics. The server makes Prometheus series of them.

The demo and the benchmarks read them directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupOverflow:
    """The entries that the sampled chunks of one ρ and scorer demanded of one head group.

    `chunks` were sampled since the start. Their own scores would have kept `wished` entries of the
    group's heads. Of these, `lost` exceeded the budgets. `exceeded` counts the heads that lost
    some, of `chunks` times the group's heads.
    """

    kv_retention: float
    kv_scorer: str
    group: int
    chunks: int
    wished: int
    lost: int
    exceeded: int


@dataclass(frozen=True)
class SpeculationStats:
    """Counts since the start: of drafts, drafted tokens and accepted tokens.

    `accepted_at[i]` counts the accepted tokens at place i of their drafts.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]


@dataclass(frozen=True)
class EngineStats:
    """One consistent reading of the engine's state, taken between two steps.

    Gauges:

    - `running` and `waiting` requests.
    - Pages of the one pool: `pages_total` = `pages_held` (by running requests) + `pages_cached`
      (kept for reuse, evictable) + `pages_free`. Of the cached and free ones, `pages_promised` are
      reserved for running requests.
    - `kv_bytes_held` is the size of the running requests' pages, where a page counts once for each
      request that holds it. `kv_bytes_uncompressed` is the size of the same tokens with nothing
      dropped.
    - `slots_held` are the entries that fit into those pages, `slots_used` those that are there.
    - `kv_token_bytes` is one uncompressed token over all layers, in `cache_dtype`, `page_bytes` a
      page.
    - `chunk_tokens` is the tokens of a chunk: prefixes are cached in whole chunks.
    - `capacity_tokens` is the tokens that the pool holds at the default retention ratio as
      sequences of max_model_len, `capacity_uncompressed_tokens` those at 1.0. Only with sliding
      windows does the length matter: shorter sequences fit fewer tokens then.
    - `host_pages_used` of `host_pages_total` pages of host memory, of `host_page_bytes`, keep links
      of the prefix cache.

    Counters since the start are the others:

    - `prompt_tokens` count when a request is admitted. So do `cached_tokens`, those of them that
      the prefix cache had. `computed_prompt_tokens` count at each step, recomputed ones again.
      `restored_tokens` are those of chunks that were copied back from host memory.
    - `host_bytes_out` and `host_bytes_in` were copied there and back.
    - `dropped_spans` are links (chunks, window parts) that host memory evicted or that did not fit.
      Without host memory they are all evicted links.
    - `step_s` are the seconds of the engine's steps. `device_s` are those in which the host waited
      for the device (on a CPU: ran the model). `sealing_s` are the device's for scoring, selecting
      and storing chunks.
    - `plans` counts decode plans by planner. `overflow` has a line a head group where it is
      measured. `speculation` is None where the engine does not speculate.
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
    chunk_tokens: int
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
    host_page_bytes: int
    restored_tokens: int
    host_bytes_out: int
    host_bytes_in: int
    dropped_spans: int
    step_s: float
    device_s: float
    sealing_s: float
    plans: Mapping[str, int]
    overflow: tuple[GroupOverflow, ...]
    speculation: SpeculationStats | None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pages_total * self.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Bytes of the host memory behind it."""
        return self.host_pages_total * self.host_page_bytes

    @property
    def retained_tokens(self) -> float:
        """The KV entries of the running requests, in whole tokens of an uncompressed cache."""
        return self.kv_bytes_held / self.kv_token_bytes

    @property
    def represented_tokens(self) -> float:
        """The tokens of those requests: an uncompressed cache would hold them all."""
        return self.kv_bytes_uncompressed / self.kv_token_bytes

    @property
    def bytes_saved(self) -> int:
        """Bytes that compression saves the running requests.

        Negative if the unused ends of pages cost more than it saves.
        """
        return self.kv_bytes_uncompressed - self.kv_bytes_held

    @property
    def slots_empty(self) -> int:
        """Fragmentation: the empty slots of the running requests' pages."""
        return self.slots_held - self.slots_used

    @property
    def hit_share(self) -> float:
        """The share of all prompt tokens so far that the prefix cache had; 0 before the first."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def host_share(self) -> float:
        """The host's own share of the time of the engine's steps; 0 before the first."""
        return 1 - self.device_s / self.step_s if self.step_s else 0.0
