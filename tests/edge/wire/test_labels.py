"""Fields that clients of OpenAI send: labels, what a chat template is told, and what is let by on
demand.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.bare_tokenizer import load_tokenizer
from tests.templates import GPT_OSS, QWEN3

from .conftest import (
    CHAT,
    COMPLETIONS,
    MODEL,
    USER,
    EngineServer,
    chat_body,
    run_fake_server,
    scrape,
)
from .tiny import TinyServer, run_tiny_server, tiny_folder

KWARGS = "chat_template_kwargs"
READABLE = frozenset({"enable_thinking", "budget"})
LABELS: dict[str, Any] = {
    "metadata": {"chat": "7", "user": "u" * 512},
    "store": False,
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "mine",
    "service_tier": "flex",
    "verbosity": "medium",
    "reasoning_effort": "none",
}


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    """A server whose chat template reads `READABLE`."""
    with run_fake_server() as server:
        server.engine.codec.template_options = READABLE
        yield server


@pytest.fixture
def lenient_server() -> Iterator[EngineServer]:
    with run_fake_server(unknown_fields="warn") as server:
        yield server


def test_labels_change_nothing(fake_server: EngineServer) -> None:
    labelled = fake_server.chat(**LABELS)
    plain = fake_server.chat()
    assert labelled.choices[0].message.content == plain.choices[0].message.content
    one, other = fake_server.engine.submitted
    assert (one.sampling, one.prompt_token_ids) == (other.sampling, other.prompt_token_ids)
    assert fake_server.engine.codec.told == [{}, {}]


def test_the_answer_says_the_tier_that_there_is_to_whom_asks(shared_server: EngineServer) -> None:
    for tier in ("auto", "default", "flex", "priority"):
        assert shared_server.chat(service_tier=tier).service_tier == "default"
        chunks = list(shared_server.chat(service_tier=tier, stream=True))
        assert {chunk.service_tier for chunk in chunks} == {"default"}
    with shared_server.http() as client:
        assert "service_tier" not in client.post(CHAT, json=chat_body()).json()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "512"),
        ({"metadata": {"a" * 65: "b"}}, None, "64"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": "a"}, "metadata", "dictionary"),
        ({"store": True}, "store", "not supported"),
        ({"service_tier": "golden"}, "service_tier", "default"),
        ({"verbosity": "loud"}, "verbosity", "low"),
        ({"verbosity": "low"}, "verbosity", "not supported"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "minimal"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "enable_thinking"),
        ({"user": "a" * 1025}, "user", "1024"),
        ({"safety_identifier": "a" * 1025}, "safety_identifier", "1024"),
        ({KWARGS: {"other": 1}}, f"{KWARGS}.other", "budget, enable_thinking"),
        ({KWARGS: []}, KWARGS, "dictionary"),
        *(
            ({KWARGS: {name: 1}}, f"{KWARGS}.{name}", "server's")
            for name in (
                "messages",
                "tools",
                "add_generation_prompt",
                "tokenize",
                "documents",
                "chat_template",
            )
        ),
        *(
            ({KWARGS: {name: 1}}, f"{KWARGS}.{name}", "server's")
            for name in (
                "continue_final_message",
                "self",
                "bos_token",
                "range",
                "raise_exception",
                "conversation",
            )
        ),
        ({KWARGS: {"__class__": 1}}, f"{KWARGS}.__class__", "budget, enable_thinking"),
        ({KWARGS: {"é": 1}}, f"{KWARGS}.é", "letters"),
        ({KWARGS: {"a b": 1}}, f"{KWARGS}.a b", "letters"),
        ({KWARGS: {"a" * 65: 1}}, f"{KWARGS}.{'a' * 64}", "64"),
        ({KWARGS: {f"a{n}": 1 for n in range(17)}}, KWARGS, "16"),
        ({KWARGS: {"budget": "a" * 5000}}, KWARGS, "4096"),
        ({KWARGS: {"budget": [1] * 2_000_000}}, KWARGS, "4096"),
        ({KWARGS: {"budget": nest(4)}}, f"{KWARGS}.budget", "3"),
        ({KWARGS: {"budget": nest(500)}}, f"{KWARGS}.budget", "3"),
        ({KWARGS: {"budget": 10**7}}, f"{KWARGS}.budget", "1000000"),
        ({KWARGS: {"budget": {"a": [float("inf")]}}}, f"{KWARGS}.budget", "1000000"),
        ({KWARGS: {"budget": {"\ud800": 1}}}, None, "nicode"),
        (
            {"reasoning_effort": "none", KWARGS: {"enable_thinking": True}},
            "reasoning_effort",
            "send one",
        ),
    ],
)
def test_what_is_wrong_with_them_is_named(
    server: EngineServer, fields: dict[str, Any], param: str | None, words: str
) -> None:
    before = list(server.engine.submitted)
    with server.http() as client:
        headers = {"Content-Type": "application/json"}
        response = client.post(CHAT, content=json.dumps(chat_body(**fields)), headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"], error
    assert error["param"] == param if param is not None else error["param"].split(".")[0] in fields
    assert server.engine.submitted == before


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({KWARGS: {"enable_thinking": False, "budget": {"low": [1, 2.5, None, "x"]}}}, None),
        ({KWARGS: {}}, {}),
        ({KWARGS: None}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "none", KWARGS: {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
        ({"reasoning_effort": None, "verbosity": "medium"}, {}),
    ],
)
def test_the_template_is_told_what_was_sent(
    server: EngineServer, fields: dict[str, Any], told: Any
) -> None:
    with server.http() as client:
        assert client.post(CHAT, json=chat_body(**fields)).status_code == 200
    assert server.engine.codec.told[-1] == (fields[KWARGS] if told is None else told)


@pytest.fixture(scope="module", params=[QWEN3, GPT_OSS], ids=["qwen3", "gpt-oss"])
def told_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinyServer]:
    """A random model behind a template that reads something."""
    folder = tiny_folder(tmp_path_factory.mktemp("told"), vocabulary=49152)
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = request.param
    tokenizer.save_pretrained(folder)
    with run_tiny_server(folder, kv_cache_gib=0.03) as server:
        yield server


def test_a_real_template_follows(told_server: TinyServer) -> None:
    """The prompt that is computed is the one that /tokenize tells, and it has what was
    asked for.
    """
    client = openai.OpenAI(base_url=f"{told_server.url}/v1", api_key="none", max_retries=0)
    thinks = "enable_thinking" in told_server.engine.codec.template_options
    asked: dict[str, Any] = {"reasoning_effort": "none" if thinks else "high"}
    options = {"enable_thinking": False} if thinks else {"reasoning_effort": "high"}
    with told_server.http() as http:
        body = {"messages": [USER], KWARGS: options}
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        refused = http.post("/tokenize", json={"prompt": "a", KWARGS: options})
    assert ("<think>\n\n</think>" if thinks else "Reasoning: high") in text
    assert refused.json()["error"]["param"] == KWARGS
    for fields in (asked, {"extra_body": {KWARGS: options}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=[USER], max_tokens=1, **fields
        )  # type: ignore[call-overload]
        assert answer.usage.prompt_tokens == len(tokens)
    with pytest.raises(openai.BadRequestError, match="verbosity"):
        client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=1, verbosity="low")  # type: ignore[list-item]


def test_what_is_not_served_is_let_by_counted_and_logged_once(
    lenient_server: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    part = {"type": "text", "text": "say it", "cache_hint": {"type": "ephemeral"}}
    unknown = {
        "guided_json": {"type": "object"},
        "temprature": 1,
        "store": True,
        KWARGS: {"enable_thinking": False},
        "reasoning_effort": "high",
        "verbosity": "low",
        "stream_options": {"include_usage": True, "often": 1},
    }
    body = chat_body(**unknown, stream=True) | {
        "messages": [USER | {"content": [part], "mood": "good"}]
    }
    with lenient_server.http() as client:
        for _ in range(2):
            answer = client.post(CHAT, json=body)
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert (
            client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "best_of": 3}).status_code
            == 200
        )
        counts = {
            labels: value
            for (name, labels), value in scrape(client).items()
            if name == "tangram_ignored_fields_total"
        }
    named = ("guided_json", "store", KWARGS, "reasoning_effort", "verbosity")
    assert counts == dict.fromkeys(named, 2.0) | {"other": 8.0, "best_of": 1.0}
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(told) == len(set(told)) == 10
    assert any("'temprature'" in line for line in told) and any("'mood'" in line for line in told)
    assert lenient_server.engine.codec.told == [{}, {}]


def test_letting_by_is_for_names_and_not_for_wrong_values(lenient_server: EngineServer) -> None:
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"n": "many"}, "n"),
        ({KWARGS: {"messages": []}}, f"{KWARGS}.messages"),
        ({"messages": [{"role": "user", "text": "a"}]}, "messages[0].content"),
    ):
        with lenient_server.http() as client:
            response = client.post(CHAT, json=chat_body(**fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_names_that_nobody_knows_fill_neither_metrics_nor_log(
    lenient_server: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    with lenient_server.http() as client:
        for start in range(0, 300, 100):
            fields = {f"field {start + number}" + "x" * 500: 1 for number in range(100)}
            assert client.post(CHAT, json=chat_body(**fields)).status_code == 200
        series = [
            labels for name, labels in scrape(client) if name == "tangram_ignored_fields_total"
        ]
    assert series == ["other"]
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 100 and max(map(len, lines)) < 200
