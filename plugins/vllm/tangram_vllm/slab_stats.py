"""What compression keeps, in vLLM's own metrics."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.metrics.loggers import PrometheusStatLogger, create_metric_per_engine

from tangram_vllm.keeping import find_note_form
from tangram_vllm.options import PluginOptions, is_wanted
from tangram_vllm.slab import Slab, full_geometry


class SlabStats(PrometheusStatLogger):
    """vLLM's metrics and, if the plugin serves, four more: `vllm:tangram_` and these names.

    `capacity_tokens` fit into the blocks, `uncompressed_capacity_tokens` would. Requests that end
    count the `sealed_chunks_total` that they did not find in the prefix cache, and the
    `kept_entries_total` of these.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self._tangram = _SlabMetrics(self) if _serves(vllm_config) else None

    def log_engine_initialized(self) -> None:
        """See vLLM."""
        super().log_engine_initialized()
        if self._tangram is not None:
            self._tangram.note_capacity()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """See vLLM."""
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if self._tangram is not None and iteration_stats is not None:
            self._tangram.count(iteration_stats.finished_requests, engine_idx)


def _serves(config: VllmConfig) -> bool:
    return is_wanted() or config.attention_config.backend == AttentionBackendEnum.CUSTOM


class _SlabMetrics:
    """The metrics of `SlabStats` beside those of vLLM."""

    def __init__(self, stats: PrometheusStatLogger) -> None:
        self._config, self._engines = stats.vllm_config, stats.per_engine_labelvalues
        gauge, counter = stats._gauge_cls, stats._counter_cls
        newest = {"multiprocess_mode": "mostrecent"}
        fit, plain = "Tokens that fit into the KV cache.", "Tokens that would, uncompressed."
        self._fit = self._make(gauge, "capacity_tokens", fit, **newest)
        self._plain = self._make(gauge, "uncompressed_capacity_tokens", plain, **newest)
        self._chunks = self._make(counter, "sealed_chunks", "Chunks that were sealed.")
        self._kept = self._make(counter, "kept_entries", "KV entries of chunks that were sealed.")
        profile = PluginOptions.read().load_profile()
        self._slab = None
        if profile is not None:
            model = profile.model
            heads = model.kv_heads, model.query_heads, model.head_dim
            geometry = full_geometry(model.layers, *heads)
            chunk_tokens = profile.chunk_tokens
            notes = find_note_form(profile, self._config.model_config.dtype.itemsize)
            self._slab = Slab.lay_out(geometry, profile, chunk_tokens, chunk_tokens, notes)

    def _make(self, kind: Any, name: str, documentation: str, **more: str) -> dict[int, Any]:
        metric = kind(
            name=f"vllm:tangram_{name}",
            documentation=documentation,
            labelnames=["model_name", "engine"],
            **more,
        )
        return dict(create_metric_per_engine(metric, self._engines))

    def note_capacity(self) -> None:
        cache = self._config.cache_config
        tokens = ((cache.num_gpu_blocks or 1) - 1) * cache.block_size
        share = 1.0 if self._slab is None else self._slab.kept_share
        for engine in self._engines:
            self._fit[engine].set(tokens)
            self._plain[engine].set(int(tokens * share))

    def count(self, finished: Any, engine: int) -> None:
        chunk_tokens = self._config.cache_config.block_size
        for request in finished:
            computed = request.num_prompt_tokens + max(request.num_generation_tokens - 1, 0)
            chunks = computed // chunk_tokens - request.num_cached_tokens // chunk_tokens
            self._chunks[engine].inc(max(chunks, 0))
            if self._slab is not None:
                self._kept[engine].inc(max(chunks, 0) * self._slab.kept_entries)
