"""The metrics of /metrics: the engine's counters, and the latencies that the server measures."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tangram.metrics import FIGURES, EngineStats, GroupOverflow, SpeculationStats, Total
from tangram.serve.record import Record
from tangram.types import Event, FinishReason

# Where API processes keep their counts. prometheus_client reads it when it is imported.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
)

_ENTERED_EACH_S = 1.0
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 900.0, 3600.0),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_Labelled = tuple[
    str, str, tuple[str, ...], Callable[[EngineStats], list[tuple[tuple[str, ...], float]]]
]

# Gauges that are computed from others: name, help, property of `EngineStats`.
_DERIVED = (
    ("kv_pool_bytes", "Bytes of the pool", "pool_bytes"),
    ("host_pool_bytes", "Bytes of host memory behind the pool", "host_pool_bytes"),
    (
        "kv_retained_tokens",
        "KV entries of the running requests, in whole tokens",
        "retained_tokens",
    ),
    (
        "kv_represented_tokens",
        "Tokens of the running requests before compression",
        "represented_tokens",
    ),
    ("kv_bytes_saved", "Bytes that compression saves the running requests", "bytes_saved"),
    (
        "prefix_cache_hit_share",
        "Share of all prompt tokens so far that the prefix cache had",
        "hit_share",
    ),
    ("step_host_share", "Share of all steps so far that was the host's own work", "host_share"),
)

# Families with labels: name, help, labels, then the label values and numbers of one reading.
_LABELLED_GAUGES: tuple[_Labelled, ...] = (
    (
        "kv_cache_info",
        "1; the label says what the KV cache is kept in",
        ("dtype",),
        lambda stats: [((stats.cache_dtype,), 1)],
    ),
    (
        "kv_pages",
        "Pages of the pool by state",
        ("state",),
        lambda stats: [
            (("held",), stats.pages_held),
            (("cached",), stats.pages_cached),
            (("free",), stats.pages_free),
        ],
    ),
    (
        "kv_slots",
        "Slots of the running requests' pages, by whether they hold an entry",
        ("state",),
        lambda stats: [(("used",), stats.slots_used), (("empty",), stats.slots_empty)],
    ),
)

_PROFILE = ("kv_retention", "kv_scorer")
_GROUP = (*_PROFILE, "group")
_LABELLED_COUNTERS: tuple[_Labelled, ...] = (
    (
        "plans",
        "Decode plans made, by planner",
        ("planner",),
        lambda stats: [((planner,), count) for planner, count in stats.plans.items()],
    ),
    (
        "budget_chunks",
        "Sealed chunks sampled to compare their own selection with the budgets",
        _PROFILE,
        lambda stats: [(_profile(line), line.chunks) for line in stats.overflow if line.group == 0],
    ),
    (
        "budget_wished_entries",
        "Entries that the sampled chunks' own scores would keep",
        _GROUP,
        lambda stats: [(_group(line), line.wished) for line in stats.overflow],
    ),
    (
        "budget_lost_entries",
        "Entries of budget_wished_entries beyond the heads' budgets",
        _GROUP,
        lambda stats: [(_group(line), line.lost) for line in stats.overflow],
    ),
    (
        "budget_exceeded_heads",
        "Heads of these chunks whose budget was exceeded",
        _GROUP,
        lambda stats: [(_group(line), line.exceeded) for line in stats.overflow],
    ),
    (
        "drafts",
        "Drafts verified",
        (),
        lambda stats: [((), one.drafts) for one in _speculation(stats)],
    ),
    (
        "draft_tokens",
        "Tokens drafted",
        (),
        lambda stats: [((), one.drafted) for one in _speculation(stats)],
    ),
    (
        "accepted_draft_tokens",
        "Drafted tokens that were accepted",
        (),
        lambda stats: [((), one.accepted) for one in _speculation(stats)],
    ),
    (
        "accepted_draft_tokens_per_position",
        "Drafted tokens that were accepted, by their place in the draft",
        ("position",),
        lambda stats: [
            ((str(place),), count)
            for one in _speculation(stats)
            for place, count in enumerate(one.accepted_at)
        ],
    ),
)


def _speculation(stats: EngineStats) -> tuple[SpeculationStats, ...]:
    return () if stats.speculation is None else (stats.speculation,)


def _profile(line: GroupOverflow) -> tuple[str, str]:
    return f"{line.kv_retention:g}", line.kv_scorer


def _group(line: GroupOverflow) -> tuple[str, str, str]:
    return *_profile(line), str(line.group)


class _EngineCollector(Collector):
    """Reads the engine's statistics once per scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, figure in FIGURES.items():
            if figure.text:
                kind = CounterMetricFamily if isinstance(figure, Total) else GaugeMetricFamily
                name, value = figure.name or field, getattr(stats, field)
                yield kind(f"tangram_{name}", figure.text, value=value)
        for name, text, field in _DERIVED:
            yield GaugeMetricFamily(f"tangram_{name}", text, value=getattr(stats, field))
        for table, family in (
            (_LABELLED_GAUGES, GaugeMetricFamily),
            (_LABELLED_COUNTERS, CounterMetricFamily),
        ):
            for name, text, labels, values in table:
                metric = family(f"tangram_{name}", text, labels=labels)
                for label_values, value in values(stats):
                    metric.add_metric(label_values, value)
                yield metric


class _ServerCollector(Collector):
    """What is counted in this process, or in all API processes of the server.

    Where there are several, prometheus_client keeps the counts in files of one folder.
    """

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        if FOLDER_VARIABLE not in os.environ:
            return self._own.collect()
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together.collect()

    def describe(self) -> Iterable[Metric]:
        """No names: they are those of `_own`."""
        return ()


class ServerMetrics:
    """The metrics of one server, in a registry of its own.

    Histograms of phases and lengths count completions that were not aborted. Times are measured in
    the server.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.stats = stats
        self.registry, self._own = CollectorRegistry(), CollectorRegistry()
        self._server = _ServerCollector(self._own)
        self.registry.register(_EngineCollector(stats))
        self.registry.register(self._server)
        self.http_requests = Counter(
            "tangram_http_requests",
            "HTTP requests answered",
            ["endpoint", "status"],
            registry=self._own,
        )
        self.completions = Counter(
            "tangram_completions", "Completions ended", ["finish_reason"], registry=self._own
        )
        self.ignored_fields = Counter(
            "tangram_ignored_fields",
            "Unsupported fields of requests that were ignored",
            ["field"],
            registry=self._own,
        )
        self.first_token_s = self._seconds(
            "time_to_first_token", "From the request to its first token"
        )
        self.inter_token_s = _GatheredHistogram(
            "tangram_inter_token_latency_seconds",
            "From one token to the next",
            buckets=_SECONDS,
            registry=self._own,
        )
        self.duration_s = self._seconds(
            "completion_duration", "From the request to its last token, or its abort"
        )
        self.queue_s = self._seconds(
            "completion_queue", "From the request to its place in the batch"
        )
        self.prefill_s = self._seconds(
            "completion_prefill", "From the place in the batch to the first token"
        )
        self.decode_s = self._seconds("completion_decode", "From the first token to the last")
        self.inference_s = self._seconds(
            "completion_inference", "From the place in the batch to the last token"
        )
        self.mean_token_s = self._seconds(
            "completion_mean_token", "Mean time of a completion from token to token"
        )
        self.prompt_tokens = self._tokens(
            "completion_prompt_tokens", "Prompt tokens of a completion"
        )
        self.generated_tokens = self._tokens(
            "completion_generated_tokens", "Tokens of a completion"
        )

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"tangram_{name}_seconds", text, buckets=_SECONDS, registry=self._own)

    def _tokens(self, name: str, text: str) -> Histogram:
        return Histogram(f"tangram_{name}", text, buckets=_TOKENS, registry=self._own)

    def count_request(self, record: Record) -> None:
        """Count an answer by endpoint and status."""
        # A client may send any path. Unknown paths share a label, so the number of series is
        # bounded.
        endpoint = record.path if record.path in ENDPOINTS else "other"
        self.http_requests.labels(
            endpoint, "cut" if record.status is None else str(record.status)
        ).inc()

    def collect_server(self) -> dict[str, Metric]:
        """What the server counts, by name: in all of its processes."""
        return {family.name: family for family in self._server.collect()}

    def render(self) -> bytes:
        """All series in the Prometheus text format."""
        return generate_latest(self.registry)


class _GatheredHistogram(Histogram):
    """A histogram that takes many values at once.

    One by one, each would take as long as a sixth of all that is done for a streamed token.
    """

    def observe_all(self, values: Sequence[float]) -> None:
        """The same as `observe` with each of `values`."""
        self._sum.inc(sum(values))
        places = Counts(bisect_left(self._upper_bounds, value) for value in values)
        for place, count in places.items():
            self._buckets[place].inc(count)


class CompletionMeter:
    """Measures the latencies of one completion, which began at `start_s` of the monotonic clock.

    Times between tokens are entered each second, and at the end.
    """

    def __init__(self, metrics: ServerMetrics, start_s: float) -> None:
        self._metrics, self._start_s = metrics, start_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._between_s: list[float] = []
        self._entered_s = start_s

    def take(self, event: Event, now_s: float) -> None:
        """Enter an event of the completion."""
        if event.token_ids:
            self._tokens(len(event.token_ids), now_s)
        if event.finish_reason is not None:
            self._phases(event)
            self.end(event.finish_reason, now_s)

    def _tokens(self, count: int, now_s: float) -> None:
        """Enter `count` tokens that arrived together. They share the time since the last token."""
        if self._last_s is None:
            self._first_s = now_s
            self._metrics.first_token_s.observe(now_s - self._start_s)
        else:
            self._between_s += [(now_s - self._last_s) / count] * count
            if now_s - self._entered_s > _ENTERED_EACH_S:
                self._enter_between(now_s)
        self._last_s = now_s

    def _enter_between(self, now_s: float) -> None:
        self._metrics.inter_token_s.observe_all(self._between_s)
        self._between_s, self._entered_s = [], now_s

    def _phases(self, event: Event) -> None:
        metrics, usage = self._metrics, event.usage
        metrics.prompt_tokens.observe(usage.prompt_tokens)
        metrics.generated_tokens.observe(usage.completion_tokens)
        if self._first_s is None or self._last_s is None or event.admitted_s is None:
            return
        metrics.queue_s.observe(event.admitted_s - self._start_s)
        metrics.prefill_s.observe(self._first_s - event.admitted_s)
        metrics.decode_s.observe(self._last_s - self._first_s)
        metrics.inference_s.observe(self._last_s - event.admitted_s)
        if usage.completion_tokens > 1:
            metrics.mean_token_s.observe(
                (self._last_s - self._first_s) / (usage.completion_tokens - 1)
            )

    def end(self, reason: FinishReason, now_s: float) -> None:
        """Enter the end of the completion, or its abort."""
        self._enter_between(now_s)
        self._metrics.completions.labels(reason.value).inc()
        self._metrics.duration_s.observe(now_s - self._start_s)
