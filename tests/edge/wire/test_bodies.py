"""Bodies of requests: what is wrong with one is said by name, with the limit and what to do, and
far too many small things in one hold up nobody.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tangram.types import ToolFormat
from tests.mentions import assert_refused, mentions

from .conftest import CHAT, COMPLETIONS, MODEL, USER, EngineServer, chat_body, run_fake_server

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
    fake_server.engine.codec.tool_format = ToolFormat("<c>", "</c>")
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
        (b'{"n": ' + b"1" * 5000 + b"}", "5000 4300"),
        (b'{"n": [-' + b"1" * 4301 + b"]}", "4301 4300"),
        (b"[" * 100_000, "levels"),
        (b'{"model": "a", }', "at character 15"),
        (b"5", "JSON object"),
        (b"null", "JSON object"),
        (b"[]", "JSON object"),
    ],
)
def test_what_is_no_body_is_told_why(
    shared_server: EngineServer, path: str, content: bytes, words: str
) -> None:
    status, error = post(shared_server, path, content)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert mentions(error["message"], words)
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
    assert mentions(error["message"], f"'{param}'")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_token_has_one_bias(shared_server: EngineServer, path: str) -> None:
    for bias, clash in (({"7": 1, "007": 2}, "'7' '007'"), ({"00": 1, "5": 1, "0": 1}, "'00' '0'")):
        error = wrong(shared_server, path, {"logit_bias": bias})
        assert error["param"] == "logit_bias" and mentions(error["message"], clash)
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
    assert error["param"] == param and mentions(error["message"], f"{param} JSON object")


def test_a_nameless_field_is_named(shared_server: EngineServer) -> None:
    for path in PLAIN:
        error = wrong(shared_server, path, {"": 1})
        assert (error["param"], error["code"]) == ('""', "unknown_field")
        assert "None" not in error["message"]
    error = wrong(shared_server, CHAT, {"messages": [USER | {"": 1}]})
    assert (error["param"], error["code"]) == ('messages[0].""', "unknown_field")


BODY_BYTES = 15_600_000
# A stall of the whole server was seconds long; a busy machine has shorter ones of its own.
STALL_S = 1.0


def many(item: str, before: str, after: str = "]", size: int = BODY_BYTES) -> bytes:
    """`item` again and again, up to `size` bytes, in a chat unless `before` has a prompt or an
    input.
    """
    asked = (
        ""
        if '"prompt"' in before or '"messages"' in before
        else f'"messages":[{json.dumps(USER)}],'
    )
    asked = "" if '"input"' in before else asked
    items = ",".join([item] * (size // (len(item) + 1)))
    return f'{{"model":"{MODEL}",{asked}{before}{items}{after}}}'.encode()


def names(count: int) -> str:
    return ",".join(f'"{number:07d}":1' for number in range(count))


def calls(count: int, arguments: str) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return json.dumps([{"role": "assistant", "tool_calls": [call]}] * count)


LISTS = '{"a":[' + ",".join(["[]"] * 4000) + "]}"
CROWDS = {
    "prompts": (COMPLETIONS, lambda: many("[5]", '"prompt":[')),
    "texts": (COMPLETIONS, lambda: many('"ab"', '"prompt":[')),
    "tokens": (COMPLETIONS, lambda: many("12345", '"prompt":[')),
    "short tokens": (COMPLETIONS, lambda: many("5", '"prompt":[')),
    "fractions": (COMPLETIONS, lambda: many("1.5", '"prompt":[')),
    "messages": (CHAT, lambda: many(json.dumps(USER), '"messages":[')),
    "parts": (
        CHAT,
        lambda: many('{"type":"text","text":"a"}', '"messages":[{"role":"user","content":[', "]}]"),
    ),
    "items": (RESPONSES, lambda: many(json.dumps(USER), '"input":[')),
    "tools": (CHAT, lambda: many("{}", '"tools":[')),
    "labels": (CHAT, lambda: many("", f'"metadata":{{{names(1_200_000)}', "}", size=0)),
    "schema": (
        CHAT,
        lambda: many(
            "12345",
            '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[',
            "]}}}",
        ),
    ),
    "arguments": (CHAT, lambda: f'{{"model":"{MODEL}","messages":{calls(1200, LISTS)}}}'.encode()),
    "tokenize": (TOKENIZE, lambda: many(json.dumps(USER), '"messages":[')),
}


def serve_apart(ready: Any, url: Any) -> None:
    """A server in a process of its own: what its clients do must not look like a stall of it."""
    with run_fake_server() as server:
        url.put(server.url)
        ready.wait()


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[str, int]]:
    """The address of a server, and its process."""
    context = multiprocessing.get_context("spawn")
    done, urls = context.Event(), context.Queue()
    process = context.Process(target=serve_apart, args=(done, urls))
    process.start()
    try:
        yield urls.get(timeout=120), process.pid or 0
    finally:
        done.set()
        process.join()


def peak_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@contextmanager
def watch_gaps(url: str) -> Iterator[list[float]]:
    """The seconds between the events of a stream."""
    gaps, over = [0.0], threading.Event()
    body = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])

    def read() -> None:
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
            last_s = time.monotonic()
            for _ in response.iter_lines():
                now_s = time.monotonic()
                gaps.append(now_s - last_s)
                last_s = now_s
                if over.is_set():
                    return
        assert over.is_set(), "the stream was cut"

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        time.sleep(0.3)
        gaps[:] = [0.0]
        yield gaps
        over.set()
        reading.result()


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_in_one_body_stops_no_stream_and_takes_little_memory(
    apart: tuple[str, int], name: str
) -> None:
    url, process = apart
    path, made = CROWDS[name]
    content = made()
    assert 8_000_000 < len(content) < 16_000_000

    def ask(_: int) -> httpx.Response:
        return httpx.post(url + path, content=content, headers=JSON, timeout=60)

    before_mib = peak_mib(process)
    with watch_gaps(url) as gaps, ThreadPoolExecutor(2) as pool:
        for response in pool.map(ask, range(2)):
            assert response.status_code == 400 and len(response.content) < 5000
    assert max(gaps) < STALL_S
    assert peak_mib(process) - before_mib < 400


@pytest.fixture
def client(shared_server: EngineServer) -> Iterator[httpx.Client]:
    with shared_server.http() as client:
        yield client


@pytest.mark.parametrize(
    "spelled",
    ['{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": [{"b": "x\\ud83d"}]}', '{"a": "\\ude00\\ud83d"}'],
)
def test_text_inside_text_is_unicode_too(client: httpx.Client, spelled: str) -> None:
    """The arguments of a call are JSON in a JSON string: what the outer one cannot hold, the inner
    may spell.
    """
    function = {"name": "f", "arguments": spelled}
    call = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    answer = client.post(CHAT, json=chat_body(messages=[USER, call]))
    assert_refused(answer, "messages[1].tool_calls[0].function.arguments", "surrogate")
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": spelled}
    answer = client.post("/v1/responses", json={"model": MODEL, "input": [item]})
    assert_refused(answer, "input[0].arguments")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"n": True}, "n"),
        ({"n": 2.0}, "n"),
        ({"stream": 1}, "stream"),
        ({"top_k": -5}, "top_k"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "a"}, "suffix"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stop": [None]}, "stop[0]"),
        ({"min_tokens": 2, "stop": "a"}, "min_tokens"),
        ({"min_tokens": 21, "max_tokens": 20}, "min_tokens"),
        ({"cache_salt": ["a"]}, "cache_salt"),
        ({"kv_retention": True}, "kv_retention"),
        ({"kv_retention": "0.5"}, "kv_retention"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[[5]]]}, "prompt"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"user": 5}, "user"),
        ({"model": ["a"]}, "model"),
    ],
)
def test_a_value_of_another_kind_is_named(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = client.post(
        COMPLETIONS, json={"model": MODEL, "prompt": "a", "max_tokens": 20} | fields
    )
    assert_refused(answer, param)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": "20"}, "max_tokens integer '20'"),
        ({"max_tokens": 2.5}, "max_tokens integer 2.5"),
        ({"temperature": True}, "temperature number true"),
        ({"echo": "yes" * 99}, "echo boolean"),
    ],
)
def test_the_value_of_another_kind_is_repeated(
    client: httpx.Client, fields: dict[str, Any], said: str
) -> None:
    answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"} | fields)
    error = assert_refused(answer, said.split()[0], said)
    assert len(error["message"]) < 100
