"""Why a prefix was not reused, as clients of the real server are told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import CHAT, COMPLETIONS, EngineServer, chat_body, run_real_server

RESPONSES = "/v1/responses"
KEYS = ("alpha", "beta")
LONG = (Path(__file__).parents[3] / "docs/architecture.md").read_text()[:6000]
MONDAY, TUESDAY = (f"Today is {day}. You help with this:\n{LONG}" for day in ("Monday", "Tuesday"))


@pytest.fixture(scope="module")
def url(python: list[str]) -> Iterator[str]:
    """A server with two keys."""
    keys = [option for key in KEYS for option in ("--api-key", key)]
    with run_real_server(*keys, "--kv-cache-gib", "0.25", python=python) as address:
        yield address


def ask(url: str, path: str, *, key: str = KEYS[0], **fields: Any) -> dict[str, Any]:
    """The answer."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "smollm2", "temperature": 0, "explain_reuse": True, **fields}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json() if not fields.get("stream") else last_usage(answer.text)
        if path == CHAT and not fields.get("stream"):
            told["shown"] = client.get(f"/v1/kv/requests/{told['id']}").json()
        told["metrics"] = client.get("/metrics").text
    return told


def last_usage(stream: str) -> dict[str, Any]:
    """The chunk of a stream that has the usage."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return next(chunk for chunk in chunks if chunk.get("usage"))


def chat(url: str, system: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Well?"}]
    return ask(url, CHAT, messages=messages, max_tokens=2, **fields)


def reuse_of(answer: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]["reuse"]
    return details


def check_dates(reuse: dict[str, Any], earlier: str, now: str) -> None:
    """It has diverged from one date to the other."""
    assert reuse["reason"] == "diverged" and reuse["lost_tokens"] >= 1024
    assert reuse["before"].endswith("Today is"), "the system's prompt is told verbatim"
    assert reuse["before"].startswith("<|im_start|>system"), "and so is what marks it"
    assert reuse["earlier"].startswith(f" {earlier}. You help with this")
    assert reuse["now"].startswith(f" {now}. You help with this")


def test_both_texts_around_a_changed_date_are_told(url: str) -> None:
    assert reuse_of(chat(url, MONDAY)) == {"reason": "none", "lost_tokens": 0}
    second = chat(url, TUESDAY)
    reuse = reuse_of(second)
    check_dates(reuse, "Monday", "Tuesday")
    assert second["shown"]["reuse"] == reuse, "the page has the same"
    (line,) = (
        line
        for line in second["metrics"].splitlines()
        if line.startswith('tangram_lost_prompt_tokens_total{reason="diverged"}')
    )
    assert float(line.split()[-1]) >= reuse["lost_tokens"]
    streamed = chat(
        url, MONDAY.replace("Monday", "Friday"), stream=True, stream_options={"include_usage": True}
    )
    assert reuse_of(streamed)["now"].startswith(" Friday")


def test_every_endpoint_tells_it(url: str) -> None:
    ask(url, RESPONSES, input="Well?", instructions=MONDAY + " End.", max_output_tokens=2)
    told = ask(
        url, RESPONSES, input="Well?", instructions=f"Now. {MONDAY} End.", max_output_tokens=2
    )
    reuse = told["usage"]["input_tokens_details"]["reuse"]
    assert reuse["reason"] == "diverged" and reuse["now"].startswith("Now.")
    prompts = ["Something else.", LONG, f"A {LONG}"]
    ask(url, COMPLETIONS, prompt=prompts[1], max_tokens=1)
    reuse = reuse_of(ask(url, COMPLETIONS, prompt=prompts, max_tokens=1))
    assert reuse["reason"] == "diverged" and reuse["at_token"] == 0, "of the prompt that lost most"


def test_messages_tell_it(url: str) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "So?"}], "max_tokens": 2}
    path = "/v1/messages"
    ask(url, path, system=MONDAY.replace("Monday", "May"), **fields)
    told = ask(url, path, system=MONDAY.replace("Monday", "June"), **fields)
    check_dates(told["usage"]["reuse"], "May", "June")


@pytest.mark.parametrize("other", [{"key": KEYS[1]}, {"cache_salt": "other"}], ids=["key", "salt"])
def test_conversations_of_others_are_not_told_of(url: str, other: dict[str, Any]) -> None:
    day = f"Today is {'-'.join(other)}day. {LONG}"
    chat(url, day)
    assert reuse_of(chat(url, day.replace("Today", "Tonight"), **other))["reason"] == "none"
    assert reuse_of(chat(url, day.replace("Today", "Yesterday")))["reason"] == "diverged"


def test_clients_are_known_by_key_and_without_keys_by_address(
    fake_server: EngineServer, locked_server: EngineServer
) -> None:
    fake_server.chat()
    with locked_server.http() as client:
        client.headers["Authorization"] = "Bearer sesame"
        client.post(CHAT, json=chat_body())
    ((near,), (key,)) = (server.engine.submitted for server in (fake_server, locked_server))
    assert near.client == b"127.0.0.1"
    assert key.client == hashlib.sha256(b"sesame").digest()


def test_who_does_not_ask_is_not_told(url: str) -> None:
    details = chat(url, MONDAY, explain_reuse=False)["usage"]["prompt_tokens_details"]
    assert details.keys() == {"cached_tokens"}
