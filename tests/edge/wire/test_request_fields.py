"""Every field of a request reaches the engine, changes nothing by design, or is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import openai
import pytest

from bench.stress.request_hooks import VOCABULARY, fitting
from tangram.limits import Biases, Bounds, Texts, Tokens, limits_of
from tangram.serve.chat.schema import CompletionRequest
from tangram.serve.responses.responses_schema import ResponsesRequest
from tangram.types import SAMPLING_LIMITS, RequestOptions, SamplingParams, SamplingValues
from tests.mentions import assert_refused

from .conftest import CHAT, COMPLETIONS, MODEL, USER, EngineServer, chat_body, run_fake_server
from .fake_engine import FakeEngine

HUGE = 10**399
SCHEMA = "response_format.json_schema.schema"
MULTIPLES = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"multipleOf": -HUGE}}}


HTTP_PAGE = Path(__file__).parents[3] / "docs" / "http.md"
HINTS = get_type_hints(SamplingParams) | get_type_hints(RequestOptions)
LIMITS = SAMPLING_LIMITS | limits_of(RequestOptions)
DESCRIBED = [entry.name for entry in (*fields(SamplingParams), *fields(RequestOptions))]


def allowed_value(name: str) -> tuple[Any, Any]:
    """A value that a field may have in JSON, and what the engine gets."""
    whole = int in (HINTS[name], *get_args(HINTS[name]))
    match LIMITS.get(name):
        case Bounds(low, high):
            value = max(low, min(high, 2)) if whole else (max(low, -1) + min(high, 1)) / 2
            return value, value
        case Texts():
            return ["a"], ("a",)
        case Tokens():
            return [4], (4,)
        case Biases(_, bounds):
            return {"65": bounds.low}, {65: bounds.low}
    value = "words" if str in (HINTS[name], *get_args(HINTS[name])) else True
    return value, value


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_described_field_reaches_the_engine(fake_server: EngineServer, name: str) -> None:
    spelled, meant = allowed_value(name)
    with fake_server.http() as client:
        body = {"model": MODEL, "prompt": "a", name: spelled}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    (request,) = fake_server.engine.submitted
    place = request if name in RequestOptions.__dataclass_fields__ else request.sampling
    assert getattr(place, name) == meant


def test_chat_and_responses_have_the_described_fields_too(fake_server: EngineServer) -> None:
    own = {"logprobs": True, "top_logprobs": 2}
    values = {name: allowed_value(name) for name in DESCRIBED if name not in ("stop", "logprobs")}
    spelled = {name: value for name, (value, _) in values.items()}
    with fake_server.http() as client:
        assert client.post(CHAT, json=chat_body(**spelled, **own)).status_code == 200
        said = {name: spelled[name] for name in ResponsesRequest.model_fields & spelled.keys()}
        body = {"model": MODEL, "input": "a", **said}
        assert client.post("/v1/responses", json=body).status_code == 200
    chat, response = ({**vars(one), **vars(one.sampling)} for one in fake_server.engine.submitted)
    assert {name: chat[name] for name in values} == {
        name: value for name, (_, value) in values.items()
    }
    assert chat["logprobs"] == 2
    assert {name: response[name] for name in said} == said


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_document_and_the_page_tell_of_every_described_field(
    shared_server: EngineServer, name: str
) -> None:
    with shared_server.http() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    forms = schemas["CompletionRequest"]["properties"][name].get("anyOf", [])
    if isinstance(bounds := LIMITS.get(name), Bounds):
        low = "exclusiveMinimum" if bounds.open_low else "minimum"
        assert (bounds.low, bounds.high) in [(one.get(low), one.get("maximum")) for one in forms]
    assert name in schemas["ChatRequest"]["properties"]
    assert re.search(rf"^\|[^|]*`{name}`", HTTP_PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", SAMPLING_LIMITS)
def test_the_fuzzer_sends_only_tokens_that_the_model_knows(name: str) -> None:
    unknown, limit = 2**31 - 1, SAMPLING_LIMITS[name]
    value: Any = {str(unknown): 1} if isinstance(limit, Biases) else [unknown]
    if isinstance(limit, Biases | Tokens):
        sent = fitting(COMPLETIONS, {"prompt": "a", name: value})[name]
        assert all(0 <= int(token) < VOCABULARY for token in sent)


def test_a_field_that_is_served_is_not_refused() -> None:
    class Wider(CompletionRequest):
        best_of: int = 1

    assert "best_of" in CompletionRequest.refused and "suffix" in Wider.refused
    assert "best_of" not in Wider.refused
    assert Wider.model_validate({"model": MODEL, "prompt": "a", "best_of": 3}).best_of == 3


LEFT_TO_THE_MODEL = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@pytest.mark.parametrize("nothing", [{}, dict.fromkeys(LEFT_TO_THE_MODEL)], ids=["unset", "null"])
def test_what_a_request_leaves_unset_or_null_is_left_to_the_model(
    fake_server: EngineServer, nothing: dict[str, None]
) -> None:
    fake_server.chat(extra_body=nothing)
    fake_server.complete(prompt="a", extra_body=nothing)
    chat, completion = (request.sampling for request in fake_server.engine.submitted)
    for sampling in (chat, completion):
        assert [getattr(sampling, name) for name in LEFT_TO_THE_MODEL] == [None] * 7
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)


def test_responses_say_which_values_hold() -> None:
    engine = FakeEngine(sampling=SamplingValues(temperature=0.2, top_p=0.9))
    url, body = "/v1/responses", {"model": MODEL, "input": "abc", "top_p": None}
    with run_fake_server(engine=engine) as server, server.http() as client:
        bare = client.post(url, json=body).json()
        stated = client.post(url, json=body | {"temperature": 0.7}).json()
    assert (bare["temperature"], bare["top_p"]) == (0.2, 0.9)
    assert (stated["temperature"], stated["top_p"]) == (0.7, 0.9)


def test_defaults_are_those_of_the_api(fake_server: EngineServer) -> None:
    fake_server.chat()
    fake_server.chat(stop="q", max_completion_tokens=3)
    fake_server.complete(prompt="a", extra_body={"top_k": -1})
    bare, chat, completion = (request.sampling for request in fake_server.engine.submitted)
    assert (bare.max_tokens, bare.logprobs, bare.stop) == (None, None, ())
    assert (chat.max_tokens, chat.stop) == (3, ("q",))
    assert (completion.max_tokens, completion.top_k) == (16, -1)
    assert [request.kv_retention for request in fake_server.engine.submitted] == [None] * 3
    assert [request.kv_scorer for request in fake_server.engine.submitted] == [None] * 3
    assert [request.speculative for request in fake_server.engine.submitted] == [None] * 3


def test_values_that_ask_for_nothing_pass(fake_server: EngineServer) -> None:
    nothing = {
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "audio": None,
        "store": False,
        "metadata": None,
        "parallel_tool_calls": True,
        "use_beam_search": False,
        "stream_options": None,
        "frequency_penalty": None,
        "stop": None,
        "logit_bias": None,
        "seed": None,
        "n": None,
    }
    with fake_server.http() as client:
        assert client.post(CHAT, json=chat_body(**nothing)).status_code == 200
        body = {
            "model": MODEL,
            "prompt": "a",
            "echo": False,
            "best_of": 1,
            "suffix": None,
            "logprobs": None,
        }
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_a_cache_key_is_a_label(fake_server: EngineServer) -> None:
    assert fake_server.chat(prompt_cache_key="mine").choices[0].message.content
    client = fake_server.openai()
    assert client.responses.create(model=MODEL, input="say it", prompt_cache_key="mine").output_text
    assert fake_server.complete(prompt="a", extra_body={"prompt_cache_key": "mine"}).choices
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.responses.create(model=MODEL, input="say it", prompt_cache_key="a" * 1025)


def test_an_answer_can_be_sent_back_as_the_client_holds_it(fake_server: EngineServer) -> None:
    """The client's message objects carry refusal, tool_calls, audio and others as nulls."""
    message = fake_server.chat().choices[0].message
    assert fake_server.chat(messages=[USER, message, USER]).choices
    assert fake_server.chat(messages=[USER, message.model_dump(), USER]).choices


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"temprature": 1}, "temprature", "unknown_field"),
        (CHAT, {"temprature": None}, "temprature", "unknown_field"),
        (CHAT, {"x\ud800": 1}, None, "unicode"),
        (CHAT, {"audio": {}}, "audio", "invalid_value"),
        (CHAT, {"min_tokens": False}, "min_tokens", "integer"),
        (CHAT, {"min_tokens": 21}, "min_tokens", "20"),
        (CHAT, {"min_tokens": 2, "stop": "a"}, "min_tokens", "stop"),
        (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "guided_json", "invalid_value"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [USER | {"color": 1}]}, "messages[0].color", "unknown_field"),
        (CHAT, {"messages": [USER | {"role": "wizard"}]}, "messages[0].role", "user"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (CHAT, {"messages": [USER | {"content": "\ud800"}]}, "messages[0].content", "surrogate"),
        (
            CHAT,
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image_url",
        ),
        (
            CHAT,
            {"messages": [USER | {"content": [{"type": "text"}]}]},
            "messages[0].content",
            "content part",
        ),
        (
            CHAT,
            {"messages": [USER | {"content": [{"type": {}, "text": ""}]}]},
            "messages[0].content",
            "content part",
        ),
        (CHAT, {"temperature": -1}, "temperature", "-1.0 [0.0, 100.0]"),
        (CHAT, {"temperature": "hot"}, "temperature", "number"),
        (CHAT, {"n": 0}, "n", "[1, 128]"),
        (CHAT, {"n": 1.5}, "n", "integer"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "greater than"),
        (
            CHAT,
            {"max_completion_tokens": 2**31, "max_tokens": None},
            "max_completion_tokens",
            "2147483647",
        ),
        (CHAT, {"max_completion_tokens": 7}, "max_completion_tokens", "max_tokens"),
        (
            CHAT,
            {"max_completion_tokens": HUGE, "max_tokens": None},
            "max_completion_tokens",
            "2147483647",
        ),
        *(
            (CHAT, {name: HUGE}, name, f"{most}]")
            for most, *names in (
                (128, "n"),
                (2**31 - 1, "max_tokens", "top_k", "min_tokens"),
                (2**63 - 1, "seed"),
            )
            for name in names
        ),
        (CHAT, {"response_format": MULTIPLES}, f"{SCHEMA}.multipleOf", "positive"),
        *((path, {"cache_salt": "a" * 1025}, "cache_salt", "1024") for path in (CHAT, COMPLETIONS)),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (
            CHAT,
            {"stream": True, "stream_options": {"verbose": 1}},
            "stream_options.verbose",
            "unknown_field",
        ),
        (CHAT, {"logit_bias": {"hello": 1}}, "logit_bias", "hello"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias[5]", "101.0 [-100.0, 100.0]"),
        (CHAT, {"stop": ["", "a"]}, "stop", "empty"),
        (CHAT, {"stop": "a" * 257}, "stop", "256"),
        (CHAT, {"stop": ["a"] * 17}, "stop", "16"),
        (CHAT, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
        (CHAT, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
        (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token id"),
        (CHAT, {"messages": [USER] * 4097}, "messages", "4096"),
        (CHAT, {"messages": [USER | {"content": "x" * 2049}]}, "messages", "2048"),
        (COMPLETIONS, {"prompt": ["fine", "x" * 2049]}, "prompt", "2048"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "invalid_value"),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "invalid_value"),
        (CHAT, {"prompt_cache_key": "a" * 1025}, "prompt_cache_key", "1024"),
        (CHAT, {"prompt_cache_key": 7}, "prompt_cache_key", "string"),
        (CHAT, {"prompt_cache_key": "\ud800"}, "prompt_cache_key", "unicode"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_key": "a" * 1025}, "prompt_cache_key", "1024"),
        (CHAT, {"kv_retention": 2}, "kv_retention", "(0, 1]"),
        (CHAT, {"kv_scorer": 7}, "kv_scorer", "string"),
        (CHAT, {"kv_scorer": "a" * 65}, "kv_scorer", "64"),
        (CHAT, {"kv_scorer": "\ud800"}, "kv_scorer", "unicode"),
        (CHAT, {"speculative": "no"}, "speculative", "boolean"),
        (COMPLETIONS, {"prompt": "a", "speculative": 1}, "speculative", "boolean"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix", "invalid_value"),
        (COMPLETIONS, {"prompt": ["a", [1]], "max_tokens": "4"}, "max_tokens", "integer"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, "n", "1024"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "n": 10**9}, "n", "1024"),
        (COMPLETIONS, {"prompt": "a", "logprobs": HUGE}, "logprobs", "20"),
        (COMPLETIONS, {"prompt": []}, "prompt", "string"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt", "string"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "no tokens"),
        (COMPLETIONS, {"prompt": ["fine", "\udfff"]}, "prompt", "surrogate"),
        (COMPLETIONS, {}, "prompt", "required"),
    ],
)
def test_a_wrong_field_is_named(
    shared_server: EngineServer, path: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, **fields}
    before = list(shared_server.engine.submitted)
    with shared_server.http() as client:
        response = client.post(
            path, content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
    assert_refused(response, param, words)
    assert shared_server.engine.submitted == before
