"""The engine's statistics. The server makes Prometheus series of them.

The demo and the benchmarks read them directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_origin, get_type_hints


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
class Figure:
    """What /metrics says of a field of `EngineStats`: its text, and its name if it has another.

    Without a text there is no series of this field alone.
    """

    text: str = ""
    name: str = ""


class Shape(Figure):
    """A figure of an engine's shape: replicas share it."""


class Held(Figure):
    """What an engine holds now. Those of replicas add up; who is gone holds nothing."""


class Total(Figure):
    """A counter since the start. Those of replicas add up, and stay when a replica is gone."""


@dataclass(frozen=True)
class EngineStats:
    """One consistent reading of the engine's state, taken between two steps.

    - Pages of the one pool: `pages_total` = `pages_held` (by running requests) + `pages_cached`
      (kept for reuse, evictable) + `pages_free`.
    - In `kv_bytes_held` a page counts once for each request that holds it. `slots_held` are the
      entries that fit into those pages, `slots_used` those that are there.
    - `kv_token_bytes` is one uncompressed token over all layers, in `cache_dtype`.
    - `chunk_tokens` is the tokens of a chunk: prefixes are cached in whole chunks.
    - Only with sliding windows does the length matter to `capacity_tokens`: shorter sequences fit
      fewer tokens then.
    - `host_pages_total` have `host_page_bytes` each.
    - `computed_prompt_tokens` count at each step, recomputed ones again.
    - `dropped_spans` are links (chunks, window parts). Without host memory they are all evicted
      links.
    - `lost_…` are prompt tokens that an earlier conversation had left in the prefix cache.
    - `plans` counts decode plans by planner. `overflow` has a line a head group where it is
      measured. `speculation` is None where the engine does not speculate.
    """

    running: Annotated[int, Held("Requests in the batch", "requests_running")]
    waiting: Annotated[int, Held("Requests in the queue", "requests_waiting")]
    pages_total: Annotated[int, Held("Pages of the pool", "kv_pages_total")]
    pages_held: Annotated[int, Held()]
    pages_cached: Annotated[int, Held()]
    pages_free: Annotated[int, Held()]
    pages_promised: Annotated[
        int, Held("Cached or free pages that running requests were promised", "kv_pages_promised")
    ]
    slots_held: Annotated[int, Held()]
    slots_used: Annotated[int, Held()]
    chunk_tokens: Annotated[int, Shape()]
    capacity_tokens: Annotated[
        int,
        Held(
            "Tokens the pool holds at the default retention ratio, as sequences of max_model_len",
            "kv_capacity_tokens",
        ),
    ]
    capacity_uncompressed_tokens: Annotated[
        int, Held("Tokens it would hold with nothing dropped", "kv_capacity_uncompressed_tokens")
    ]
    cache_dtype: Annotated[str, Shape()]
    page_bytes: Annotated[int, Shape("Bytes of a page", "kv_page_bytes")]
    kv_token_bytes: Annotated[int, Shape()]
    kv_bytes_held: Annotated[int, Held("Bytes of the running requests' pages")]
    kv_bytes_uncompressed: Annotated[
        int, Held("Bytes the same tokens would take with nothing dropped")
    ]
    prompt_tokens: Annotated[int, Total("Prompt tokens of admitted requests")]
    cached_tokens: Annotated[
        int, Total("Prompt tokens served from the prefix cache", "cached_prompt_tokens")
    ]
    computed_prompt_tokens: Annotated[int, Total()]
    generated_tokens: Annotated[int, Total("Tokens generated")]
    preemptions: Annotated[int, Total("Running requests sent back to the queue for lack of pages")]
    steps: Annotated[int, Total("Forward passes")]
    sealed_chunks: Annotated[int, Total("Chunks compressed into their final pages")]
    host_pages_total: Annotated[int, Held("Pages of host memory behind the pool")]
    host_pages_used: Annotated[int, Held("Pages of host memory that keep cached spans")]
    host_page_bytes: Annotated[int, Shape()]
    restored_tokens: Annotated[int, Total("Tokens of chunks copied back from host memory")]
    host_bytes_out: Annotated[int, Total("Bytes of KV pages copied to host memory")]
    host_bytes_in: Annotated[int, Total("Bytes of KV pages copied back from host memory")]
    dropped_spans: Annotated[
        int, Total("Evicted spans that host memory could not keep, or dropped later")
    ]
    step_s: Annotated[float, Total("Seconds of the engine's steps", "step_seconds")]
    device_s: Annotated[
        float,
        Total(
            "Step seconds in which the host waited for the device; on a CPU, ran the model",
            "step_device_seconds",
        ),
    ]
    sealing_s: Annotated[
        float, Total("Device seconds of scoring, selecting and storing chunks", "sealing_seconds")
    ]
    lost_diverged: Annotated[int, Total()]
    lost_evicted: Annotated[int, Total()]
    lost_stateless: Annotated[int, Total()]
    plans: Mapping[str, int]
    overflow: tuple[GroupOverflow, ...]
    speculation: SpeculationStats | None
    disk_spans: Annotated[int, Held("Spans on disk")] = 0
    disk_bytes: Annotated[int, Held("Bytes of the spans on disk")] = 0
    disk_hits: Annotated[int, Total("Spans read from disk", "disk_spans_read")] = 0
    disk_misses: Annotated[int, Total("Prompts of which no place had every chunk")] = 0
    disk_corrupt: Annotated[
        int, Total("Damaged spans that were removed from disk", "disk_spans_corrupt")
    ] = 0
    disk_dropped: Annotated[
        int, Total("Spans that could not be written to disk", "disk_spans_dropped")
    ] = 0

    @property
    def held_share(self) -> float:
        """The share of the pool's pages that running requests hold."""
        return self.pages_held / self.pages_total

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


_HINTS = get_type_hints(EngineStats, include_extras=True).items()
# The numbers of `EngineStats` and the dtype, by field: what each of them is.
FIGURES: Mapping[str, Figure] = {
    name: kind.__metadata__[0] for name, kind in _HINTS if get_origin(kind) is Annotated
}
