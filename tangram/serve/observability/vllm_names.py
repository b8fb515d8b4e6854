"""Tangram's metrics under vLLM's names, for dashboards and autoscalers that use these.

Names, types and labels are those of vLLM V1 (docs.vllm.ai, usage/metrics). Metrics of features that
this engine lacks are missing: adapters, transfers between servers. Those of drafts are there if the
engine speculates. Buckets are Tangram's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tangram.metrics import SpeculationStats
from tangram.serve.observability.exposition import ACCEPTED_AT, DRAFTS, ServerMetrics, make_family

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
        self._gauge = partial(make_family, GaugeMetricFamily, common=self._labels)
        self._counter = partial(make_family, CounterMetricFamily, common=self._labels)

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        stats, gauge, counter = self._metrics.stats(), self._gauge, self._counter
        for name, text, figure in _GAUGES:
            yield gauge(f"vllm:{name}", text, [((), getattr(stats, figure))])
        # What routers read of it: prefixes are cached in blocks, which are chunks here.
        text = "1; the labels say how many blocks of how many tokens fit into the pool"
        sizes = str(stats.chunk_tokens), str(stats.capacity_tokens // stats.chunk_tokens)
        names = ("block_size", "num_gpu_blocks")
        yield gauge("vllm:cache_config_info", text, [(sizes, 1)], names)
        for name, text, figure in _COUNTERS:
            yield counter(f"vllm:{name}", text, [((), getattr(stats, figure))])
        if stats.speculation is not None:
            yield from self._drafts(stats.speculation)
        counted = self._metrics.collect_server()
        if (ended := counted.get("tangram_completions")) is not None:
            totals = (sample for sample in ended.samples if sample.name.endswith("_total"))
            found = (([sample.labels["finish_reason"]], sample.value) for sample in totals)
            name, text = "vllm:request_success", "Completions ended"
            yield counter(name, text, found, ["finished_reason"])
        for name, source_name in _HISTOGRAMS:
            if (source := counted.get(source_name)) is not None:
                yield self._histogram(name, source)

    def _drafts(self, drafted: SpeculationStats) -> Iterator[Metric]:
        for field, (text, _, name) in DRAFTS.items():
            yield self._counter(f"vllm:spec_decode_{name}", text, [((), getattr(drafted, field))])
        places = (([str(place)], count) for place, count in enumerate(drafted.accepted_at))
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._counter(name, ACCEPTED_AT, places, ["position"])

    def _histogram(self, name: str, source: Metric) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", source.documentation)
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            if suffix != "_created":
                family.add_sample(
                    f"vllm:{name}{suffix}", self._labels | sample.labels, sample.value
                )
        return family
