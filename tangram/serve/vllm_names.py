"""Tangram's metrics under vLLM's names, for dashboards and autoscalers that use these.

Names, types and labels are those of vLLM V1 (docs.vllm.ai, usage/metrics). Metrics of features that
this engine lacks are missing: adapters, transfers between servers. Those of drafts are there if the
engine speculates. Buckets are Tangram's.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tangram.metrics import EngineStats, SpeculationStats
from tangram.serve.exposition import ServerMetrics

# Names, texts, and figures of `EngineStats`.
_GAUGES = (
    ("num_requests_running", "Requests in the batch", "running"),
    ("num_requests_waiting", "Requests in the queue", "waiting"),
    ("kv_cache_usage_perc", "Share of the pool's pages that requests hold (0 to 1)", "held_share"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens served from the prefix cache", "cached_tokens"),
    ("generation_tokens", "Tokens generated", "generated_tokens"),
    ("num_preemptions", "Running requests sent back to the queue", "preemptions"),
    ("prefix_cache_queries", "Tokens that the prefix cache was asked for", "prompt_tokens"),
    ("prefix_cache_hits", "Tokens that it had", "cached_tokens"),
)
# And of `SpeculationStats`.
_DRAFTS = (
    ("num_drafts", "Drafts verified", "drafts"),
    ("num_draft_tokens", "Tokens drafted", "drafted"),
    ("num_accepted_tokens", "Drafted tokens that were accepted", "accepted"),
)
# And the names of Tangram's.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "tangram_time_to_first_token_seconds"),
    ("inter_token_latency_seconds", "tangram_inter_token_latency_seconds"),
    # The first name in V1
    ("time_per_output_token_seconds", "tangram_inter_token_latency_seconds"),
    ("request_time_per_output_token_seconds", "tangram_completion_mean_token_seconds"),
    ("e2e_request_latency_seconds", "tangram_completion_duration_seconds"),
    ("request_queue_time_seconds", "tangram_completion_queue_seconds"),
    ("request_prefill_time_seconds", "tangram_completion_prefill_seconds"),
    ("request_decode_time_seconds", "tangram_completion_decode_seconds"),
    ("request_inference_time_seconds", "tangram_completion_inference_seconds"),
    ("request_prompt_tokens", "tangram_completion_prompt_tokens"),
    ("request_generation_tokens", "tangram_completion_generated_tokens"),
)


class VllmNames(Collector):
    """The series of `metrics` under vLLM's names, labelled with the served `model` and engine 0."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        self._metrics, self._labels = metrics, {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        stats, names, values = (
            self._metrics.stats(),
            list(self._labels),
            list(self._labels.values()),
        )
        for name, text, figure in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric(values, getattr(stats, figure))
            yield gauge
        yield self._cache_config(stats)
        for name, text, figure in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric(values, getattr(stats, figure))
            yield counter
        if stats.speculation is not None:
            yield from self._drafts(stats.speculation)
        counted = self._metrics.collect_server()
        if (ended := counted.get("tangram_completions")) is not None:
            yield self._successes(ended)
        for name, own in _HISTOGRAMS:
            if (source := counted.get(own)) is not None:
                yield self._histogram(name, source)

    def _cache_config(self, stats: EngineStats) -> Metric:
        """What routers read of it: prefixes are cached in blocks, which are chunks here."""
        sizes = {
            "block_size": str(stats.chunk_tokens),
            "num_gpu_blocks": str(stats.capacity_tokens // stats.chunk_tokens),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; the labels say how many blocks of how many tokens fit into the pool",
            labels=[*self._labels, *sizes],
        )
        family.add_metric([*self._labels.values(), *sizes.values()], 1)
        return family

    def _drafts(self, drafted: SpeculationStats) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, text, figure in _DRAFTS:
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=names)
            family.add_metric(values, getattr(drafted, figure))
            yield family
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the draft",
            labels=[*names, "position"],
        )
        for place, accepted in enumerate(drafted.accepted_at):
            by_place.add_metric([*values, str(place)], accepted)
        yield by_place

    def _successes(self, source: Metric) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Completions ended", labels=[*self._labels, "finished_reason"]
        )
        for sample in source.samples:
            if sample.name.endswith("_total"):
                family.add_metric(
                    [*self._labels.values(), sample.labels["finish_reason"]], sample.value
                )
        return family

    def _histogram(self, name: str, source: Metric) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", source.documentation)
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            if suffix != "_created":
                family.add_sample(
                    f"vllm:{name}{suffix}", self._labels | sample.labels, sample.value
                )
        return family
