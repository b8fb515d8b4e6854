"""What a server tells of itself: every metric moves with a real model, and page, dashboard and
exposition agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from .conftest import CHAT, MODEL, EngineServer, chat_body, run_fake_server
from .scenario import WatchedServer, loaded_server

ROOT = Path(__file__).parents[3]
CONSTANT = {
    "tangram_kv_pages_total",
    "tangram_kv_capacity_tokens",
    "tangram_kv_capacity_uncompressed_tokens",
    "tangram_host_pages_total",
    "tangram_kv_page_bytes",
    "tangram_kv_pool_bytes",
    "tangram_host_pool_bytes",
    "tangram_kv_cache_info",
    "vllm:cache_config_info",
}
# This load has no disk, from which what it evicts would come back: tests/core/cpu/test_disk.py.
OF_DISK = {
    "tangram_disk_spans",
    "tangram_disk_bytes",
    "tangram_disk_misses_total",
    "tangram_disk_spans_read_total",
    "tangram_disk_spans_corrupt_total",
    "tangram_disk_spans_dropped_total",
}
# What the dashboard leaves out on purpose: shares since the start, where it draws those of late;
# sums of what it draws apart; what never changes; and other names of the same numbers.
UNDRAWN = {
    "tangram_disk_spans",
    "tangram_prefix_cache_hit_share",
    "tangram_step_host_share",
    "tangram_completion_inference_seconds",
    "tangram_completion_mean_token_seconds",
    "tangram_kv_page_bytes",
    "tangram_kv_pool_bytes",
    "tangram_host_pool_bytes",
    "tangram_kv_cache_info",
}


def families(text: str) -> dict[str, Metric]:
    """Metric families by the name that their samples have; times of creation aside."""
    found = text_string_to_metric_families(text)
    named = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in found
    }
    return {name: family for name, family in named.items() if not name.endswith("_created")}


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


@pytest.fixture(scope="module")
def watched(python: list[str]) -> Iterator[WatchedServer]:
    with loaded_server(python) as watched:
        yield watched


@pytest.fixture(scope="module")
def exposed(watched: WatchedServer) -> dict[str, Metric]:
    return families(httpx.get(f"{watched.url}/metrics", timeout=30).text)


@pytest.fixture
def named_server() -> Iterator[EngineServer]:
    with run_fake_server(metrics_aliases="vllm", unknown_fields="warn") as server:
        yield server


def test_every_metric_moves_under_a_real_load(
    watched: WatchedServer, exposed: dict[str, Metric]
) -> None:
    moved = {name for name, _ in _find_changes(watched)}
    still = {
        name
        for name, family in exposed.items()
        if name not in CONSTANT | OF_DISK
        and not any(sample.name in moved for sample in family.samples)
    }
    assert not still, "nothing has ever changed them"
    assert {name for (name, _), value in watched.readings[-1].items() if value > 0} >= CONSTANT


def _find_changes(watched: WatchedServer) -> Iterator[tuple[str, Any]]:
    first = watched.readings[0]
    for reading in watched.readings[1:]:
        yield from (key for key, value in reading.items() if value != first.get(key, 0.0))


def test_every_reading_adds_up(watched: WatchedServer) -> None:
    for reading in watched.readings:
        value = {name: number for (name, labels), number in reading.items() if not labels}
        of_state = {
            (name, labels[0][1]): number
            for (name, labels), number in reading.items()
            if len(labels) == 1
        }
        pages = [of_state["tangram_kv_pages", state] for state in ("held", "cached", "free")]
        assert sum(pages) == value["tangram_kv_pages_total"]
        assert value["tangram_kv_pool_bytes"] == sum(pages) * value["tangram_kv_page_bytes"]
        assert 0 <= value["tangram_kv_pages_promised"] <= pages[1] + pages[2]
        assert value["tangram_kv_bytes_saved"] == pytest.approx(
            value["tangram_kv_bytes_uncompressed"] - value["tangram_kv_bytes_held"]
        )
        assert min(of_state["tangram_kv_slots", state] for state in ("used", "empty")) >= 0
        assert value["tangram_step_device_seconds_total"] <= value["tangram_step_seconds_total"]
        assert 0 <= value["tangram_step_host_share"] <= 1
        assert value["tangram_cached_prompt_tokens_total"] <= value["tangram_prompt_tokens_total"]
        assert value["tangram_host_pages_used"] <= value["tangram_host_pages_total"]


def test_counters_never_fall(watched: WatchedServer) -> None:
    for before, after in zip(watched.readings, watched.readings[1:], strict=False):
        for key, value in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and key[0] not in CONSTANT:
                assert after[key] >= value, key


def test_phases_of_a_completion_add_up(watched: WatchedServer) -> None:
    last = {name: number for (name, labels), number in watched.readings[-1].items() if not labels}
    sums = {
        phase: last[f"tangram_completion_{phase}_seconds_sum"]
        for phase in ("prefill", "decode", "inference")
    }
    assert sums["prefill"] + sums["decode"] == pytest.approx(sums["inference"])
    assert 0 < last["tangram_sealing_seconds_total"] < last["tangram_step_device_seconds_total"]


def test_overflow_is_counted_within_its_bounds(exposed: dict[str, Metric]) -> None:
    by_name = {
        name: {
            sample.labels["group"]: sample.value
            for sample in exposed[f"tangram_budget_{name}_total"].samples
        }
        for name in ("wished_entries", "lost_entries", "exceeded_heads")
    }
    (chunks,) = exposed["tangram_budget_chunks_total"].samples
    assert 0 < chunks.value <= exposed["tangram_sealed_chunks_total"].samples[0].value
    for group, wished in by_name["wished_entries"].items():
        assert by_name["lost_entries"][group] <= wished
        assert by_name["exceeded_heads"][group] <= 4 * chunks.value, (
            "a group has at most four heads"
        )
    # The embedded model has 30 layers of 3 heads; half of each chunk of 512 is shared out.
    assert sum(by_name["wished_entries"].values()) == chunks.value * 30 * 3 * 512 / 2


def test_vllms_names_have_the_same_numbers(
    exposed: dict[str, Metric], watched: WatchedServer
) -> None:
    def sample(name: str) -> float:
        (found,) = [one.value for one in exposed[name].samples]
        return float(found)

    for theirs, ours in {
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generated_tokens",
        "num_preemptions": "preemptions",
        "prefix_cache_hits": "cached_prompt_tokens",
    }.items():
        assert sample(f"vllm:{theirs}_total") == sample(f"tangram_{ours}_total") > 0
    for theirs, ours in {
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "request_queue_time_seconds": "completion_queue_seconds",
        "request_prompt_tokens": "completion_prompt_tokens",
    }.items():
        pairs = zip(
            exposed[f"vllm:{theirs}"].samples, exposed[f"tangram_{ours}"].samples, strict=True
        )
        for one, other in pairs:
            assert one.name.removeprefix(f"vllm:{theirs}") == other.name.removeprefix(
                f"tangram_{ours}"
            )
            assert one.value == other.value and one.labels.get("le") == other.labels.get("le")
            assert (one.labels["model_name"], one.labels["engine"]) == ("smollm2", "0")
    full = max(
        value
        for reading in watched.readings
        for (name, _), value in reading.items()
        if name == "vllm:kv_cache_usage_perc"
    )
    assert 0.5 < full <= 1


def test_vllms_names_are_there_on_request_only(
    named_server: EngineServer, fake_server: EngineServer
) -> None:
    for server, expected in ((named_server, True), (fake_server, False)):
        with server.http() as client:
            client.post(CHAT, json=chat_body())
            assert (
                any(name.startswith("vllm:") for name in families(client.get("/metrics").text))
                is expected
            )


def test_the_page_has_every_metric_as_it_is_exposed(named_server: EngineServer) -> None:
    """The fake engine has a number for everything, one head group included."""
    with named_server.http() as client:
        client.post(CHAT, json=chat_body(max_tokens=3, best_of=2))
        found = families(client.get("/metrics").text)
    documented = {}
    # Those of replicas are of `tangram deploy`.
    for line in ROOT.joinpath("docs", "observability.md").read_text().splitlines():
        if match := re.match(r"\| `(tangram_(?!replica)\w+)` \| (\w+) \|([^|]*)\|", line):
            documented[match[1]] = match[2], set(re.findall(r"`(\w+)`", match[3]))
    own = {name: family for name, family in found.items() if not name.startswith("vllm:")}
    assert documented == {name: (family.type, labels_of(family)) for name, family in own.items()}
    text = ROOT.joinpath("docs", "from-vllm.md").read_text()
    aliases = dict(re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert aliases == {name: family.type for name, family in found.items() if name not in own}


def test_the_dashboard_draws_what_there_is(exposed: dict[str, Metric]) -> None:
    dashboard = json.loads(ROOT.joinpath("examples", "grafana", "tangram.json").read_text())
    drawn: set[str] = set()
    for expression in _expressions(dashboard):
        for name in re.findall(r"\b(?:tangram_|vllm:)\w+", expression):
            stem = re.sub(r"_(bucket|sum|count)$", "", name)
            drawn.add(stem if stem in exposed and exposed[stem].type == "histogram" else name)
    assert drawn <= exposed.keys(), "the dashboard draws what no server has"
    own = {name for name in exposed if name.startswith("tangram_")}
    assert own - drawn == UNDRAWN


def _expressions(dashboard: dict[str, Any]) -> list[str]:
    targets = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    return targets + [
        entry["query"]["query"]
        for entry in dashboard["templating"]["list"]
        if entry["type"] == "query"
    ]


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    dashboard = json.loads(ROOT.joinpath("examples", "grafana", "tangram.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_metrics_name_the_model_they_are_of(named_server: EngineServer) -> None:
    with named_server.http() as client:
        found = families(client.get("/metrics").text)
    assert {
        sample.labels["model_name"] for sample in found["vllm:num_requests_running"].samples
    } == {MODEL}
