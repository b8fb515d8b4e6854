"""The metrics of /metrics: the engine's counters, and the latencies that the server measures."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.routing import compile_path

from tangram.metrics import FIGURES, EngineStats, Figure, GroupOverflow, Total
from tangram.serve.observability.record import Record
from tangram.types import Event, FinishReason

# Where API processes keep their counts. prometheus_client reads it when it is imported.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/kv/model",
    "/v1/kv/requests/{id}",
    "/v1/kv/requests/{id}/kept",
    "/v1/kv/pool",
    "/v1/kv/history",
    "/v1/kv/events",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
)

# A model's name may have slashes.
_PATTERNS = {
    name: compile_path(name.replace("{model}", "{model:path}"))[0]
    for name in ENDPOINTS
    if "{" in name
}
_ENTERED_EACH_S = 1.0
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 900.0, 3600.0),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]

# Gauges that are computed from others, by property of `EngineStats`.
_DERIVED = {
    "pool_bytes": Figure("Bytes of the pool", "kv_pool_bytes"),
    "host_pool_bytes": Figure("Bytes of host memory behind the pool"),
    "retained_tokens": Figure(
        "KV entries of the running requests, in whole tokens", "kv_retained_tokens"
    ),
    "represented_tokens": Figure(
        "Tokens of the running requests before compression", "kv_represented_tokens"
    ),
    "bytes_saved": Figure("Bytes that compression saves the running requests", "kv_bytes_saved"),
    "hit_share": Figure(
        "Share of all prompt tokens so far that the prefix cache had", "prefix_cache_hit_share"
    ),
    "host_share": Figure(
        "Share of all steps so far that was the host's own work", "step_host_share"
    ),
}
_PROFILE = ("kv_retention", "kv_scorer")
# Figures of `GroupOverflow`, and of `SpeculationStats` with their names at vLLM.
_OVERFLOW = {
    "wished": Figure(
        "Entries that the sampled chunks' own scores would keep", "budget_wished_entries"
    ),
    "lost": Figure(
        "Entries of budget_wished_entries beyond the heads' budgets", "budget_lost_entries"
    ),
    "exceeded": Figure("Heads of these chunks whose budget was exceeded", "budget_exceeded_heads"),
}
DRAFTS = {
    "drafts": ("Drafts verified", "drafts", "num_drafts"),
    "drafted": ("Tokens drafted", "draft_tokens", "num_draft_tokens"),
    "accepted": (
        "Drafted tokens that were accepted",
        "accepted_draft_tokens",
        "num_accepted_tokens",
    ),
}
ACCEPTED_AT = "Drafted tokens that were accepted, by their place in the draft"


def make_family(
    kind: Family,
    name: str,
    text: str,
    values: Iterable[tuple[Sequence[str], float]],
    labels: Sequence[str] = (),
    common: Mapping[str, str] = MappingProxyType({}),
) -> Metric:
    """The family of the numbers in `values`, each behind the values of its `labels`.

    All have the `common` labels with these values, too.
    """
    family = kind(name, text, labels=[*common, *labels])
    for label_values, value in values:
        family.add_metric([*common.values(), *label_values], value)
    return family


def _list_gauges(stats: EngineStats) -> Iterator[Metric]:
    """The gauges with labels."""
    make = partial(make_family, GaugeMetricFamily)
    text = "1; the label says what the KV cache is kept in"
    yield make("tangram_kv_cache_info", text, [([stats.cache_dtype], 1)], ["dtype"])
    pages = [(["held"], stats.pages_held), (["cached"], stats.pages_cached)]
    pages += [(["free"], stats.pages_free)]
    yield make("tangram_kv_pages", "Pages of the pool by state", pages, ["state"])
    text = "Slots of the running requests' pages, by whether they hold an entry"
    slots = [(["used"], stats.slots_used), (["empty"], stats.slots_empty)]
    yield make("tangram_kv_slots", text, slots, ["state"])


def _list_counters(stats: EngineStats) -> Iterator[Metric]:
    """The counters with labels, and those of drafts, which only some engines count."""
    make, drafted = partial(make_family, CounterMetricFamily), stats.speculation
    plans = (([planner], count) for planner, count in stats.plans.items())
    yield make("tangram_plans", "Decode plans made, by planner", plans, ["planner"])
    text = "Prompt tokens computed that an earlier conversation had left in the prefix cache"
    lost = [
        *((["diverged"], stats.lost_diverged), (["evicted"], stats.lost_evicted)),
        (["stateless"], stats.lost_stateless),
    ]
    yield make("tangram_lost_prompt_tokens", text, lost, ["reason"])
    text = "Sealed chunks sampled to compare their own selection with the budgets"
    chunks = ((_profile(line), line.chunks) for line in stats.overflow if line.group == 0)
    yield make("tangram_budget_chunks", text, chunks, _PROFILE)
    for field, figure in _OVERFLOW.items():
        groups = (
            ((*_profile(line), str(line.group)), getattr(line, field)) for line in stats.overflow
        )
        yield make(f"tangram_{figure.name}", figure.text, groups, (*_PROFILE, "group"))
    for field, (text, name, _) in DRAFTS.items():
        yield make(f"tangram_{name}", text, (drafted and [((), getattr(drafted, field))]) or ())
    accepted = enumerate(() if drafted is None else drafted.accepted_at)
    places = (([str(place)], count) for place, count in accepted)
    name = "tangram_accepted_draft_tokens_per_position"
    yield make(name, ACCEPTED_AT, places, ["position"])


def _profile(line: GroupOverflow) -> tuple[str, str]:
    return f"{line.kv_retention:g}", line.kv_scorer


class _EngineCollector(Collector):
    """Reads the engine's statistics once per scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, figure in {**FIGURES, **_DERIVED}.items():
            if figure.text:
                kind = CounterMetricFamily if isinstance(figure, Total) else GaugeMetricFamily
                name, value = figure.name or field, getattr(stats, field)
                yield make_family(kind, f"tangram_{name}", figure.text, [((), value)])
        yield from _list_gauges(stats)
        yield from _list_counters(stats)


class _ServerCollector(Collector):
    """What is counted in this process, or in all API processes of the server.

    Where there are several, prometheus_client keeps the counts in files of one folder.
    """

    def __init__(self, counted: CollectorRegistry) -> None:
        self._counted = counted

    def collect(self) -> Iterable[Metric]:
        if FOLDER_VARIABLE not in os.environ:
            return self._counted.collect()
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together.collect()

    def describe(self) -> Iterable[Metric]:
        """No names: they are those of `_counted`."""
        return ()


class ServerMetrics:
    """The metrics of one server, in a registry of its own.

    Histograms of phases and lengths count completions that were not aborted. Times are measured in
    the server.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.stats = stats
        self.registry, self._counted = CollectorRegistry(), CollectorRegistry()
        self._server = _ServerCollector(self._counted)
        self.registry.register(_EngineCollector(stats))
        self.registry.register(self._server)
        counter = partial(Counter, registry=self._counted)
        self.http_requests = counter(
            "tangram_http_requests", "HTTP requests answered", ["endpoint", "status"]
        )
        self.completions = counter("tangram_completions", "Completions ended", ["finish_reason"])
        self.ignored_fields = counter(
            "tangram_ignored_fields", "Unsupported fields of requests that were ignored", ["field"]
        )
        seconds, tokens = self._seconds, self._tokens
        self.first_token_s = seconds("time_to_first_token", "From the request to its first token")
        self.inter_token_s = seconds("inter_token_latency", "From one token to the next")
        self.duration_s = seconds(
            "completion_duration", "From the request to its last token, or its abort"
        )
        self.queue_s = seconds("completion_queue", "From the request to its place in the batch")
        self.prefill_s = seconds(
            "completion_prefill", "From the place in the batch to the first token"
        )
        self.decode_s = seconds("completion_decode", "From the first token to the last")
        self.inference_s = seconds(
            "completion_inference", "From the place in the batch to the last token"
        )
        self.mean_token_s = seconds(
            "completion_mean_token", "Mean time of a completion from token to token"
        )
        self.prompt_tokens = tokens("completion_prompt_tokens", "Prompt tokens of a completion")
        self.generated_tokens = tokens("completion_generated_tokens", "Tokens of a completion")

    def _seconds(self, name: str, text: str) -> _GatheredHistogram:
        name = f"tangram_{name}_seconds"
        return _GatheredHistogram(name, text, buckets=_SECONDS, registry=self._counted)

    def _tokens(self, name: str, text: str) -> Histogram:
        return Histogram(f"tangram_{name}", text, buckets=_TOKENS, registry=self._counted)

    def count_request(self, record: Record) -> None:
        """Count an answer by endpoint and status."""
        # A client may send any path. Unknown paths share a label, so the number of series is
        # bounded.
        self.http_requests.labels(
            name_endpoint(record.path), "cut" if record.status is None else str(record.status)
        ).inc()

    def collect_server(self) -> dict[str, Metric]:
        """What the server counts, by name: in all of its processes."""
        return {family.name: family for family in self._server.collect()}

    def render(self) -> bytes:
        """All series in the Prometheus text format."""
        return generate_latest(self.registry)


def name_endpoint(path: str) -> str:
    """The endpoint at `path`, with the names of its parameters; `other` if there is none."""
    if path in ENDPOINTS:
        return path
    return next((name for name, form in _PATTERNS.items() if form.match(path)), "other")


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
