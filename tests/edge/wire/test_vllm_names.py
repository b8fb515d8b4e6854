"""Every series under vLLM's names has the value of the one under ours, of numbers that are all
different.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import Metric

from tangram.metrics import EngineStats

from .conftest import CHAT, MODEL, chat_body, run_fake_server
from .fake_engine import FakeEngine
from .test_observability import families

PAGE = Path(__file__).parents[3] / "docs/scale.md"
GAUGES = {"num_requests_running": "requests_running", "num_requests_waiting": "requests_waiting"}
COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "cached_prompt_tokens",
    "generation_tokens": "generated_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_prompt_tokens",
    "request_success": "completions",
}
DRAFTS = {
    "num_drafts": "drafts",
    "num_draft_tokens": "draft_tokens",
    "num_accepted_tokens": "accepted_draft_tokens",
    "num_accepted_tokens_per_pos": "accepted_draft_tokens_per_position",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "completion_mean_token_seconds",
    "e2e_request_latency_seconds": "completion_duration_seconds",
    "request_queue_time_seconds": "completion_queue_seconds",
    "request_prefill_time_seconds": "completion_prefill_seconds",
    "request_decode_time_seconds": "completion_decode_seconds",
    "request_inference_time_seconds": "completion_inference_seconds",
    "request_prompt_tokens": "completion_prompt_tokens",
    "request_generation_tokens": "completion_generated_tokens",
}


@pytest.fixture
def exposed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Metric]:
    """What is exposed after completions of several lengths and ends, by an engine all of whose
    numbers differ.
    """
    plain = FakeEngine.stats

    def tell_stats(engine: FakeEngine) -> EngineStats:
        return replace(
            plain(engine),
            running=41,
            waiting=42,
            prompt_tokens=4300,
            cached_tokens=44,
            generated_tokens=45,
            preemptions=46,
            pages_held=250,
        )

    monkeypatch.setattr(FakeEngine, "stats", tell_stats)
    with run_fake_server(metrics_aliases="vllm") as server, server.http() as client:
        for fields in (
            {"max_tokens": 3},
            {"n": 2},
            {"messages": [{"role": "user", "content": "a"}]},
        ):
            assert client.post(CHAT, json=chat_body(**fields)).status_code == 200
        return families(client.get("/metrics").text)


def numbers(family: Metric) -> dict[tuple[str, ...], float]:
    """(rest of the sample's name, what its labels say besides model and engine) → value."""
    values: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        own = [
            value for label, value in sample.labels.items() if label not in ("model_name", "engine")
        ]
        if not sample.name.endswith("_created"):
            values[sample.name.removeprefix(family.name), *own] = sample.value
    return values


def test_each_has_the_value_of_ours(exposed: dict[str, Metric]) -> None:
    counters = COUNTERS | {f"spec_decode_{theirs}": ours for theirs, ours in DRAFTS.items()}
    pairs = {**GAUGES, **HISTOGRAMS} | {
        f"{theirs}_total": f"{ours}_total" for theirs, ours in counters.items()
    }
    named = {name.removeprefix("vllm:") for name in exposed if name.startswith("vllm:")}
    assert named == {*pairs, "kv_cache_usage_perc", "cache_config_info"}
    for theirs, ours in pairs.items():
        found = numbers(exposed[f"vllm:{theirs}"])
        assert found == numbers(exposed[f"tangram_{ours}"]), theirs
        assert max(found.values()) > 0, theirs
        for sample in exposed[f"vllm:{theirs}"].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")
    assert numbers(exposed["vllm:kv_cache_usage_perc"]) == {("",): 0.25}
    (sizes,) = exposed["vllm:cache_config_info"].samples
    assert (sizes.labels["block_size"], sizes.labels["num_gpu_blocks"]) == ("512", "3")


def test_no_two_of_ours_are_alike(exposed: dict[str, Metric]) -> None:
    """Or a name that is given to the wrong one would not be found."""
    ours = {
        *GAUGES.values(),
        *HISTOGRAMS.values(),
        *(f"{name}_total" for name in (*COUNTERS.values(), *DRAFTS.values())),
    }
    values = [tuple(numbers(exposed[f"tangram_{name}"]).values()) for name in ours]
    assert len(set(values)) == len(values)


def test_an_engine_that_drafts_nothing_has_no_series_of_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = FakeEngine.stats
    monkeypatch.setattr(
        FakeEngine, "stats", lambda engine: replace(plain(engine), speculation=None)
    )
    with run_fake_server(metrics_aliases="vllm") as server, server.http() as client:
        found = families(client.get("/metrics").text)
    named = [name for name in found if name.startswith("vllm:spec_decode") or "draft" in name]
    assert not [name for name in named if found[name].samples]


def test_the_page_says_what_routers_find(exposed: dict[str, Metric]) -> None:
    """docs/scale.md lists what llm-d and the production stack read, and what of it is here."""
    table = PAGE.read_text().partition("### Metrics and probes")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    known = {sample.name for family in exposed.values() for sample in family.samples}
    series = [row for row in rows if row[0].startswith("`vllm:")]
    assert len(series) >= 5
    for name, *_, here in series:
        names = set(re.findall(r"`(vllm:\w+)`", name))
        assert names <= known if here.startswith("yes") else names.isdisjoint(known), name
        for label in re.findall(r"`([a-z_]+)`", name.partition("labels")[2]):
            (family,) = names
            assert all(label in sample.labels for sample in exposed[family].samples)
    with run_fake_server() as server, server.http() as client:
        paths = [(*re.findall(r"`GET (/\S+)`", row[0]), row[-1]) for row in rows if "GET" in row[0]]
        assert {path for path, _ in paths} >= {"/health", "/ready", "/v1/models"}
        for path, here in paths:
            assert client.get(path).status_code == (404 if here == "no" else 200), path
