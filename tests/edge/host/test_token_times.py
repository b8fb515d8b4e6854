"""The times between tokens are entered many at once, and count as if entered one by one."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, Metric

from tangram.metrics import EngineStats
from tangram.serve.observability.exposition import CompletionMeter, ServerMetrics
from tangram.types import Event, FinishReason, Usage

NAME = "tangram_inter_token_latency_seconds"


def event(tokens: int, reason: FinishReason | None = None) -> Event:
    """An event of one completion."""
    return Event("1", 0, (7,) * tokens, (), Usage(3, tokens, 0, 0, 0), reason)


def refuse_to_tell() -> EngineStats:
    """No engine is asked."""
    raise AssertionError


def read(families: Iterable[Metric]) -> dict[str, float]:
    """Values of the histogram by bucket, their count and their sum."""
    (family,) = (one for one in families if one.name == NAME)
    return {
        sample.labels.get("le", sample.name.removeprefix(NAME)): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from((0.0, 0.001, 0.005, 0.01, 0.3, 1.0, 2.5, 60.0, 1e4)), st.integers(0, 3)
        ),
        max_size=30,
    )
)
def test_they_count_as_one_by_one(steps: list[tuple[float, int]]) -> None:
    metrics = ServerMetrics(refuse_to_tell)
    bounds = [float(b) for b in read(metrics.collect_server().values()) if b[0].isdigit()]
    registry = CollectorRegistry()
    plain = Histogram(NAME, "as prometheus_client counts", buckets=bounds, registry=registry)
    meter, now_s, last_s = CompletionMeter(metrics, 5.0), 5.0, nan
    for wait_s, tokens in steps:
        now_s += wait_s
        meter.take(event(tokens), now_s)
        if tokens:
            for _ in range(0 if isnan(last_s) else tokens):
                plain.observe((now_s - last_s) / tokens)
            last_s = now_s
    meter.end(FinishReason.ABORT, now_s)
    assert read(metrics.collect_server().values()) == pytest.approx(read(registry.collect()))


def test_a_long_answer_is_seen_before_its_end() -> None:
    metrics = ServerMetrics(refuse_to_tell)
    meter = CompletionMeter(metrics, 0.0)
    for number in range(50):
        meter.take(event(1), number / 10)
    assert read(metrics.collect_server().values())["_count"] >= 39
