"""`response_format` over the wire: the real server, the official client, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.mentions import assert_refused

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, stream_data

SMOL = "smollm2"


class PlaceVisit(BaseModel):
    model_config = ConfigDict(extra="forbid")
    place: Literal["museum", "beach", "market"]
    hours: int = Field(ge=1, le=12)


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    visits: list[PlaceVisit] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=10)


QUESTION = {"role": "user", "content": "Plan a short trip to Rome, as JSON."}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.fixture
def client(server_url: str) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("temperature", "seed"),
    [
        (0, 1),
        (1.5, 2),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((0.7, 1), (0.7, 2), (1.5, 1))),
    ],
)
def test_the_client_parses_answers_into_a_model(client: Any, temperature: float, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=SMOL,
        messages=[QUESTION],
        response_format=Trip,
        temperature=temperature,
        seed=seed,
        max_tokens=300,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_streams_and_several_choices_follow_the_schema_too(client: Any) -> None:
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=SMOL,
        messages=[QUESTION],
        n=3,
        stream=True,
        temperature=1,
        max_tokens=300,
        seed=4,
        response_format=schema_format(Trip.model_json_schema()),
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(Trip.model_validate_json(text) for text in texts)
    assert len(set(texts)) > 1


def test_any_json_object(client: Any) -> None:
    """A small model may go on until its limit, but what it writes is the beginning of an object."""
    answer = client.chat.completions.create(
        model=SMOL,
        messages=[QUESTION],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    assert answer.message.content.startswith("{")


def test_completions_have_formats_too(client: Any) -> None:
    wish = {"response_format": schema_format({"enum": ["yes", "no"]})}
    answer = client.completions.create(
        model=SMOL, prompt=["It is ", "Is it "], max_tokens=9, extra_body=wish
    )
    assert {choice.text for choice in answer.choices} <= {'"yes"', '"no"'}


def test_logprobs_count_only_what_could_be_said(client: Any) -> None:
    answer = client.chat.completions.create(
        model=SMOL,
        messages=[QUESTION],
        max_tokens=60,
        logprobs=True,
        top_logprobs=5,
        response_format=schema_format({"enum": ["yes"]}),
    ).choices[0]
    assert answer.message.content == '"yes"'
    for entry in answer.logprobs.content:
        assert entry.logprob <= 0
        assert sum(2.718281828**top.logprob for top in entry.top_logprobs) <= 1.0001


@pytest.mark.parametrize("companions", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_plain_request_beside_it_gets_the_same_answer(client: Any, companions: int) -> None:
    def plain() -> str:
        fields: dict[str, Any] = {
            "messages": [USER],
            "temperature": 0,
            "max_tokens": 24,
            "extra_body": {"ignore_eos": True},
        }
        return str(client.chat.completions.create(model=SMOL, **fields).choices[0].message.content)

    def shape_answer(seed: int) -> str:
        answer = client.chat.completions.create(
            model=SMOL,
            messages=[QUESTION],
            seed=seed,
            max_tokens=300,
            response_format=schema_format(Trip.model_json_schema()),
        )
        return str(answer.choices[0].message.content)

    alone = plain()
    with ThreadPoolExecutor(2 + companions) as pool:
        others = [pool.submit(shape_answer, seed) for seed in range(companions)]
        together = [pool.submit(plain) for _ in range(2)]
        assert [answer.result() for answer in together] == [alone] * 2
        assert all(Trip.model_validate_json(answer.result()) for answer in others)


def test_a_compilation_does_not_stall_who_is_being_answered(server_url: str) -> None:
    """The largest schema that is let in takes a tenth of a second or more to compile."""
    large = {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(900)},
    }
    body = {"model": SMOL, "messages": [USER], "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server_url, timeout=60) as http, ThreadPoolExecutor(1) as pool:
        http.post(CHAT, json={"model": SMOL, "messages": [USER], "max_tokens": 1})
        ask = {
            "model": SMOL,
            "messages": [USER],
            "max_tokens": 2,
            "response_format": schema_format(large),
        }
        with http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            other = pool.submit(lambda: [http.post(CHAT, json=ask).status_code for _ in range(3)])
            times_s = [time.monotonic() for line in lines if line]
        assert other.result() == [200] * 3
    gaps_s = sorted(after - before for before, after in pairwise(times_s))
    assert gaps_s[-1] < 2.0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "belongs",
        ),
        (
            {"response_format": schema_format({}, color=1)},
            "response_format.json_schema.color",
            "unknown_field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
            "required",
        ),
        (
            {"response_format": schema_format([])},
            "response_format.json_schema.schema",
            "dictionary",
        ),
        (
            {"response_format": schema_format({"if": {}})},
            "response_format.json_schema.schema.if",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "min_tokens": 1},
            "min_tokens",
            "response_format",
        ),
    ],
)
def test_a_wrong_format_is_named(
    shared_server: EngineServer, fields: dict[str, Any], param: str, words: str
) -> None:
    with shared_server.http() as http:
        response = http.post(CHAT, json=chat_body(**fields))
    assert_refused(response, param, words)


def test_the_format_reaches_the_engine_as_a_grammar(fake_server: EngineServer) -> None:
    with fake_server.http() as http:
        for wish in (
            {"type": "text"},
            {"type": "json_object"},
            schema_format({"const": "é"}, strict=True, description="d"),
        ):
            assert http.post(CHAT, json=chat_body(response_format=wish)).status_code == 200
        with http.stream(
            "POST", CHAT, json=chat_body(response_format={"type": "json_object"}, stream=True)
        ) as response:
            assert stream_data(response)[-1] == "[DONE]"
    grammars = [request.grammar for request in fake_server.engine.submitted]
    objects, constant = [source for source, _ in fake_server.engine.grammars.sources]
    used = [grammar and grammar.source for grammar in grammars]
    assert used == [None, objects, constant, objects]
    assert json.dumps("é") in constant
    assert fake_server.chat(model=MODEL, response_format={"type": "text"}).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_much_is_the_fields_fault(server_url: str, stream: bool) -> None:
    wish = schema_format({"type": "string", "pattern": "^((a|b){1,1000}){200,1000}$"})
    body = {
        "model": SMOL,
        "messages": [USER],
        "response_format": wish,
        "max_tokens": 200,
        "stream": stream,
    }
    with httpx.Client(base_url=server_url, timeout=60) as http:
        response = http.post(CHAT, json=body)
        assert response.status_code == (200 if stream else 400)
        error = (
            json.loads(stream_data(response)[-2])["error"] if stream else response.json()["error"]
        )
        assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")
        fine = body | {"stream": False, "response_format": schema_format({"enum": ["a"]})}
        assert http.post(CHAT, json=fine).json()["choices"][0]["message"]["content"] == '"a"'
