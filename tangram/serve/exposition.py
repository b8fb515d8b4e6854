"""What /metrics tells Prometheus: the engine's books, read at scrape time, and the latencies the server itself sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tangram.metrics import EngineStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests", "prompt_tokens"),
    ("cached_prompt_tokens", "Prompt tokens served from the prefix cache", "cached_tokens"),
    ("generated_tokens", "Tokens generated", "generated_tokens"),
    ("preemptions", "Running requests sent back to the queue for lack of pages", "preemptions"),
    ("steps", "Forward passes", "steps"),
    ("sealed_chunks", "Chunks compressed into their final pages", "sealed_chunks"),
    ("restored_tokens", "Tokens of chunks copied back from host memory", "restored_tokens"),
    ("host_bytes_out", "Bytes of KV pages copied to host memory", "host_bytes_out"),
    ("host_bytes_in", "Bytes of KV pages copied back from host memory", "host_bytes_in"),
    ("dropped_spans", "Evicted spans that host memory had no room for, or let go", "dropped_spans"),
)

_GAUGES = (
    ("requests_running", "Requests in the batch", "running"),
    ("requests_waiting", "Requests in the queue", "waiting"),
    ("kv_pages_total", "Pages of the pool", "pages_total"),
    ("host_pages_total", "Pages of host memory behind the pool", "host_pages_total"),
    ("host_pages_used", "Pages of host memory that keep cached spans", "host_pages_used"),
    ("kv_capacity_tokens", "Tokens the pool holds at the default retention ratio", "capacity_tokens"),
    ("kv_capacity_uncompressed_tokens", "Tokens it would hold with nothing dropped", "capacity_uncompressed_tokens"),
    ("kv_retained_tokens", "KV entries of the running requests, in whole tokens", "retained_tokens"),
    ("kv_represented_tokens", "Tokens those entries stand for (their full-cache equivalent)", "represented_tokens"),
    ("kv_bytes_held", "Bytes of the running requests' pages", "kv_bytes_held"),
    ("kv_bytes_uncompressed", "Bytes the same tokens would take with nothing dropped", "kv_bytes_uncompressed"),
)


class _EngineCollector(Collector):
    """Reads the engine's books once per scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(f"tangram_{name}", text, value=getattr(stats, field))
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(f"tangram_{name}", text, value=getattr(stats, field))
        pages = GaugeMetricFamily("tangram_kv_pages", "Pages of the pool by state", labels=["state"])
        for state in ("held", "cached", "free"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages


class ServerMetrics:
    """The series of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.http_requests = Counter(
            "tangram_http_requests", "HTTP requests answered", ["endpoint", "status"], registry=self._registry
        )
        self.completions = Counter(
            "tangram_completions", "Completions ended", ["finish_reason"], registry=self._registry
        )
        self.first_token_s = self._latency("tangram_time_to_first_token_seconds", "From the request to its first token")
        self.inter_token_s = self._latency("tangram_inter_token_latency_seconds", "From one token to the next")
        self.duration_s = self._latency("tangram_completion_duration_seconds", "From the request to its last token")

    def _latency(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self._registry)

    def render(self) -> bytes:
        """All series in the Prometheus text format."""
        return generate_latest(self._registry)


class LatencyMeter:
    """Times the tokens of one completion, in seconds of a monotonic clock."""

    def __init__(self, metrics: ServerMetrics, start_s: float) -> None:
        self._metrics, self._start_s = metrics, start_s
        self._last_s: float | None = None

    def tokens(self, count: int, now_s: float) -> None:
        """`count` tokens arrived together: a burst shares the gap before it."""
        if self._last_s is None:
            self._metrics.first_token_s.observe(now_s - self._start_s)
        else:
            for _ in range(count):
                self._metrics.inter_token_s.observe((now_s - self._last_s) / count)
        self._last_s = now_s

    def end(self, finish_reason: str, now_s: float) -> None:
        """The completion ended."""
        self._metrics.completions.labels(finish_reason).inc()
        self._metrics.duration_s.observe(now_s - self._start_s)
