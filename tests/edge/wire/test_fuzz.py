"""Requests made up from the OpenAPI document, for some seconds; `make fuzz` is the long form."""

from __future__ import annotations

import tempfile
from typing import Any

import httpx
import jsonschema_rs
import psutil
import pytest
from pydantic import ValidationError

from bench.stress.fuzz import KEY, check_afterwards, check_log, fuzz, statuses
from bench.stress.request_hooks import MOST_TOKENS, fitting, small
from bench.stress.server import start_server
from tangram.serve.chat.schema import ChatRequest
from tangram.serve.observability.exposition import ENDPOINTS, name_endpoint
from tangram.serve.transport.guard import OPEN_PATHS

from .conftest import (
    CHAT,
    COMPLETIONS,
    EngineServer,
    chat_body,
    run_page_server,
    scrape,
    wait_until,
)

OPEN_S, LOCKED_S = 6, 6
LABELS: tuple[dict[str, Any], ...] = (
    {"metadata": {"chat": "7"}, "service_tier": "flex", "store": False, "user": "me"},
    {
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "verbosity": "high",
    },
)
WRONG_LABELS: tuple[dict[str, Any], ...] = (
    {"metadata": {"a": 1}},
    {"metadata": {"a": "b" * 513}},
    {"metadata": {"a" * 65: "b"}},
    {"chat_template_kwargs": {"tools": []}},
    {"chat_template_kwargs": {"a b": 1}},
    {"chat_template_kwargs": {f"a{number}": 1 for number in range(17)}},
    {"service_tier": "golden"},
    {"store": True},
    {"user": "a" * 1025},
)


def test_no_request_breaks_an_open_server(server_url: str) -> None:
    fuzz(server_url, OPEN_S, {}, "fuzzing")
    with httpx.Client(base_url=server_url, timeout=60) as client:
        wait_until(
            lambda: scrape(client)["tangram_kv_pages", "held"] == 0,
            "pages are still held",
            timeout_s=30,
        )
        found = scrape(client)
        assert client.get("/health").status_code == 200
    assert not [
        name for name in found if name[0] == "tangram_http_requests_total" and ",5" in name[1]
    ]
    pages = sum(found["tangram_kv_pages", state] for state in ("held", "cached", "free"))
    assert pages == found["tangram_kv_pages_total", ""]


def test_no_request_breaks_a_server_with_a_key() -> None:
    with tempfile.TemporaryFile() as log:
        with start_server(("--kv-retention", "0.5"), log, KEY, counted=True) as server:
            assert server.counts is not None
            counted = {int(one.name) for one in server.counts.iterdir()}
            children = psutil.Process(server.process.pid).children()
            assert counted >= {server.process.pid, *(child.pid for child in children)}
            assert server.heap_mb() > 50
            fuzz(server.url, LOCKED_S, server.headers, "coverage")
            check_afterwards(server)
            counts = statuses(server)
        check_log(log)
    assert counts["200"] and counts["400"] and counts["401"]


@pytest.fixture
def document(locked_server: EngineServer) -> Any:
    return ask_document(locked_server)


def ask_document(server: EngineServer) -> Any:
    with server.http() as client:
        return client.get("/openapi.json", headers={"Authorization": "Bearer sesame"}).json()


def test_every_endpoint_has_a_label_of_its_own() -> None:
    with run_page_server("sesame") as server:
        paths = ask_document(server)["paths"].keys()
    assert set(ENDPOINTS) == paths
    made = [path.replace("{id}", "a").replace("{model}", "org/model") for path in paths]
    assert [name_endpoint(path) for path in made] == list(paths)
    nowhere = ("/", "/v1/responses/", "/v1/responses/a/b", "/v1/kv/requests/a/b")
    assert {name_endpoint(path) for path in nowhere} == {"other"}


def test_the_document_says_what_every_endpoint_answers(document: Any) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], "validation is answered with 400"
            assert ("401" in operation["responses"]) == (path.encode() not in OPEN_PATHS)
    chat = document["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "500", "503", "504"} <= chat.keys()
    assert chat["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_the_document_says_the_ranges_that_the_server_keeps(
    document: Any, locked_server: EngineServer
) -> None:
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    ranges = {
        name: form
        for name, schema in properties.items()
        for form in schema.get("anyOf", [])
        if "maximum" in form
    }
    assert {"n", "temperature", "top_p", "seed", "max_tokens", "top_logprobs"} <= ranges.keys()
    with locked_server.http() as client:
        for name in ranges.keys() - {"kv_retention", "seed"}:
            body = chat_body(
                **{"logprobs": True, "max_tokens": None, name: ranges[name]["maximum"] + 1}
            )
            response = client.post(CHAT, json=body, headers={"Authorization": "Bearer sesame"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_the_document_has_the_forms_that_validators_take(document: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    tool = {"type": "function", "function": {"name": "weather"}}
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    validator = jsonschema_rs.validator_for(
        {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    )
    for fields in (
        {"tool_choice": named},
        {"tool_choice": "required"},
        {"stop": "a"},
        {"stop": ["a"]},
        {"seed": None},
        *LABELS,
    ):
        assert validator.is_valid(body | fields), fields
        ChatRequest.model_validate(body | fields)
    for fields in (
        {"tool_choice": {"name": "weather"}},
        {"stop_token_ids": [-1]},
        {"cache_salt": "a" * 1025},
    ):
        assert not validator.is_valid(body | fields), fields
    for fields in WRONG_LABELS:
        assert not validator.is_valid(body | fields), fields
        with pytest.raises(ValidationError):
            ChatRequest.model_validate(body | fields)


def test_a_document_without_keys_asks_for_none(shared_server: EngineServer) -> None:
    with shared_server.http() as client:
        found = client.get("/openapi.json").json()
    assert "security" not in found and "securitySchemes" not in found["components"]


def test_what_is_out_of_range_is_sent_as_it_was_made_up() -> None:
    assert small(CHAT, {"max_tokens": 10**6, "n": 129})["n"] == 129
    assert small(CHAT, {"max_tokens": -1})["max_tokens"] == -1
    assert small(CHAT, {"n": 100})["max_completion_tokens"] == MOST_TOKENS
    assert small(COMPLETIONS, {"prompt": ["a"] * 9, "max_tokens": 2**31})["max_tokens"] == 2**31
    assert len(fitting(CHAT, {"messages": [{"role": "tool"}] * 4096})["messages"]) < 10
    assert fitting(COMPLETIONS, {"prompt": [50_000], "kv_retention": 0.9}) == {
        "prompt": [848],
        "kv_retention": 1.0,
    }
