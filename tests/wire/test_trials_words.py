"""What is wrong with a body is said in words of the API: by name, with the limit, and
what to do.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tangram.types import ToolFormat

from .conftest import CHAT, COMPLETIONS, MODEL, USER, EngineServer, chat_body

RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
JSON = {"Content-Type": "application/json"}
HALF = "\ud800"
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETIONS: {"model": MODEL, "prompt": "a", "max_tokens": 2},
    RESPONSES: {"model": MODEL, "input": "a", "max_output_tokens": 2},
    TOKENIZE: {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


def post(
    server: EngineServer, path: str, content: bytes, **headers: str
) -> tuple[int, dict[str, Any]]:
    with server.http() as client:
        response = client.post(path, content=content, headers=JSON | headers)
    return response.status_code, response.json().get("error")


def wrong(server: EngineServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The error of a plain body with these `fields`."""
    status, error = post(server, path, json.dumps(PLAIN[path] | fields).encode())
    assert status == 400, error
    return error


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
FUNCTION = {"name": "f", "description": "a", "parameters": {}}
HALVES: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"model": HALF}, "model") for path in PLAIN),
    *(
        (path, {name: HALF}, name)
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for name in ("user", "prompt_cache_key")
    ),
    (CHAT, {"safety_identifier": "a" + HALF}, "safety_identifier"),
    (CHAT, {"metadata": {"a": HALF}}, "metadata.a"),
    (CHAT, {"metadata": {HALF: "a"}}, "metadata"),
    (CHAT, {"cache_salt": HALF}, "cache_salt"),
    (CHAT, {"stop": [HALF]}, "stop[0]"),
    (CHAT, {"logit_bias": {HALF: 1}}, "logit_bias"),
    (CHAT, {"messages": [USER | {"name": HALF}]}, "messages[0].name"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": HALF}]},
        "messages[0].tool_call_id",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": HALF}]}]},
        "messages[0].tool_calls[0].id",
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION | {"name": HALF}}]},
        "tools[0].function.name",
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION | {"description": HALF}}]},
        "tools[0].function.description",
    ),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": HALF}}}, "tool_choice"),
    (CHAT, {"chat_template_kwargs": {"a": HALF}}, "chat_template_kwargs.a"),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "description": HALF},
            }
        },
        "response_format.json_schema.description",
    ),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"const": HALF}},
            }
        },
        "response_format.json_schema.schema",
    ),
    (COMPLETIONS, {"prompt": ["a", HALF]}, "prompt"),
    (RESPONSES, {"safety_identifier": HALF}, "safety_identifier"),
    (RESPONSES, {"instructions": HALF}, "instructions"),
    (RESPONSES, {"input": HALF}, "input[0].content"),
    (RESPONSES, {"input": [{"role": "user", "content": "a", "id": HALF}]}, "input[0].id"),
    (RESPONSES, {"input": [CALLED | {"call_id": HALF}]}, "input[0].call_id"),
    (RESPONSES, {"input": [CALLED | {"name": HALF}]}, "input[0].name"),
    (
        RESPONSES,
        {"tools": [{"type": "function", **FUNCTION, "description": HALF}]},
        "tools[0].description",
    ),
    (RESPONSES, {"tool_choice": {"type": "function", "name": HALF}}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "text", "name": HALF}}}, "text.format.name"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_object", "description": HALF}}},
        "text.format.description",
    ),
    (TOKENIZE, {"prompt": HALF}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param"), HALVES)
def test_half_a_character_is_refused_by_name(
    shared_server: EngineServer, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    streamed = {"stream": True} if stream and path in (CHAT, COMPLETIONS, RESPONSES) else {}
    error = wrong(shared_server, path, fields | streamed)
    assert error["param"] == param
    assert "surrogate" in error["message"] or "must be a token id" in error["message"]


def test_half_a_character_in_a_field_that_is_let_by_or_unknown(shared_server: EngineServer) -> None:
    for path in PLAIN:
        assert wrong(shared_server, path, {HALF: 1})["code"] in ("unknown_field", "invalid_value")
    assert (
        wrong(shared_server, RESPONSES, {"previous_response_id": HALF})["param"]
        == "previous_response_id"
    )
    assert wrong(shared_server, RESPONSES, {"metadata": {"a": HALF}})["param"] == "metadata.a"


LONG = "x" * 5_000_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(
            (path, {name: LONG}, name)
            for path in (CHAT, RESPONSES)
            for name in ("user", "safety_identifier")
        ),
        *(
            (path, {"prompt_cache_key": LONG}, "prompt_cache_key")
            for path in (CHAT, COMPLETIONS, RESPONSES)
        ),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "id": LONG}]}, "input[0].id"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_object", "name": LONG}}},
            "text.format.name",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_object", "description": LONG}}},
            "text.format.description",
        ),
        (RESPONSES, {"tool_choice": {"type": "function", "name": LONG}}, "tool_choice"),
    ],
)
def test_what_an_answer_repeats_is_bounded(
    shared_server: EngineServer, path: str, fields: dict[str, Any], param: str
) -> None:
    error = wrong(shared_server, path, fields)
    assert error["param"] == param and len(error["message"]) < 2000


def test_the_first_events_leave_out_what_is_long(fake_server: EngineServer) -> None:
    fake_server.engine.codec.tool_format = ToolFormat("<c>", "</c>", "arguments")
    fake_server.engine.codec.longest_token_bytes = 1000
    asked = PLAIN[RESPONSES] | {"stream": True, "instructions": "be short"}
    for length, times in ((100, 3), (100_000, 1)):
        tool = {"type": "function", **FUNCTION, "description": "d" * length}
        with fake_server.http() as client:
            answer = client.post(RESPONSES, json=asked | {"tools": [tool]}).text
        assert answer.count("d" * length) == times
        assert answer.count('"instructions":"be short"') == 3
        *_, last = [
            json.loads(line.removeprefix("data: "))
            for line in answer.splitlines()
            if line.startswith("data: ")
        ]
        assert last["response"]["tools"][0]["description"] == "d" * length


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b'{"model": 1}', mtime=0), "not compressed"),
        ('{"user": "é"}'.encode("latin-1"), "not UTF-8"),
        (b'{"user": "\xed\xa0\x80"}', "not UTF-8"),
        (b"", "is empty"),
        (b'{"n": ' + b"1" * 5000 + b"}", "5000 digits, at most 4300"),
        (b'{"n": [-' + b"1" * 4301 + b"]}", "4301 digits, at most 4300"),
        (b"[" * 100_000, "too many levels"),
        (b'{"model": "a", }', "at character 15"),
        (b"5", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_what_is_no_body_is_told_why(
    shared_server: EngineServer, path: str, content: bytes, words: str
) -> None:
    status, error = post(shared_server, path, content)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert not any(
        word in error["message"]
        for word in ("instance of", "None", "parsing the body", "set_int_max")
    )


def test_what_is_in_another_coding_is_told_so(shared_server: EngineServer) -> None:
    body = json.dumps(PLAIN[CHAT]).encode()
    for coding in ("gzip", "br, gzip", "x" * 3000):
        status, error = post(
            shared_server, CHAT, gzip.compress(body), **{"Content-Encoding": coding}
        )
        assert (status, error["code"]) == (415, "unsupported_content_encoding")
        assert "Content-Encoding" in error["message"] and len(error["message"]) < 300
    assert post(shared_server, CHAT, body, **{"Content-Encoding": "Identity"})[0] == 200
    with shared_server.http() as client:
        for headers in (
            {},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
        ):
            response = client.post(CHAT, content=body, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (
                400,
                "invalid_content_type",
            )
    for spelled in (
        "application/json; charset=latin-1",
        "application/vnd.api+json",
        "APPLICATION/JSON",
    ):
        assert post(shared_server, CHAT, body, **{"Content-Type": spelled})[0] == 200
    assert post(shared_server, CHAT, body.decode().encode("utf-16"))[0] == 200


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (
            CHAT,
            b'{"model":"other","model":"fake-model","messages":[{"role":"user","content":"a"}]}',
            "model",
        ),
        (
            CHAT,
            b'{"model":"fake-model","messages":[{"role":"user","content":"a","content":"b"}]}',
            "content",
        ),
        (TOKENIZE, b'{"prompt":"a","chat_template_kwargs":{"a":1,"\\u0061":1}}', "a"),
        (COMPLETIONS, b'{"model":"fake-model","prompt":"a","logit_bias":{"7":1,"7":2}}', "7"),
        (RESPONSES, b'{"model":"fake-model","input":"a","stream":false,"stream":false}', "stream"),
        (TOKENIZE, b'{"prompt":"a","prompt":"a"}', "prompt"),
        (TOKENIZE, b'{"prompt":"' + b"a" * 100_000 + b'","prompt":"a"}', "prompt"),
    ],
)
def test_a_field_that_comes_twice_is_refused_by_name(
    shared_server: EngineServer, path: str, content: bytes, param: str
) -> None:
    status, error = post(shared_server, path, content)
    assert (status, error["param"], error["code"]) == (400, param, "duplicate_field")
    assert f"'{param}' more than once" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_token_has_one_bias(shared_server: EngineServer, path: str) -> None:
    for bias in ({"7": 1, "007": 2}, {"00": 1, "5": 1, "0": 1}):
        error = wrong(shared_server, path, {"logit_bias": bias})
        assert error["param"] == "logit_bias" and "the same token" in error["message"]
    assert (
        post(
            shared_server,
            path,
            json.dumps(PLAIN[path] | {"logit_bias": {"007": 1, "8": 1}}).encode(),
        )[0]
        == 200
    )


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [5]}, "messages[0]"),
        (CHAT, {"stream_options": 5}, "stream_options"),
        (CHAT, {"tools": ["f"]}, "tools[0]"),
        (CHAT, {"metadata": []}, "metadata"),
        (RESPONSES, {"input": [5]}, "input[0]"),
        (RESPONSES, {"text": 5}, "text"),
        (RESPONSES, {"reasoning": "low"}, "reasoning"),
    ],
)
def test_what_should_be_an_object_is_told_so(
    shared_server: EngineServer, path: str, fields: dict[str, Any], param: str
) -> None:
    error = wrong(shared_server, path, fields)
    assert (error["param"], error["message"]) == (
        param,
        f"{param}: must be a JSON object (a dictionary)",
    )


def test_a_nameless_field_is_named(shared_server: EngineServer) -> None:
    for path in PLAIN:
        error = wrong(shared_server, path, {"": 1})
        assert (error["param"], error["code"]) == ('""', "unknown_field")
        assert "None" not in error["message"]
    error = wrong(shared_server, CHAT, {"messages": [USER | {"": 1}]})
    assert (error["param"], error["code"]) == ('messages[0].""', "unknown_field")
