"""What hostile clients tried and got a plain answer to: paths, keys, pages of others, texts inside
texts.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

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

ORIGIN = "https://a.example"


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    """With the key "k 1" of nobody, "k1" of everybody here, and pages of one origin."""
    with run_fake_server("k1", "k2", allowed_origins=(ORIGIN,)) as server:
        yield server


@pytest.fixture
def client(server: EngineServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer k1"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=10) as client:
        yield client


def raw(server: EngineServer, *heads: str, body: bytes = b"") -> bytes:
    """What comes until the server closes, for these heads sent at once."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=5)) as connection:
        connection.sendall("".join(f"{head}\r\n\r\n" for head in heads).encode("latin-1") + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def head(target: str, *lines: str, method: str = "GET", key: str | None = "Bearer k1") -> str:
    keys = [] if key is None else [f"Authorization: {key}"]
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *keys, *lines])


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/models", 200),
        ("/%76%31/models", 200),
        ("/v1/models?x=1", 200),
        ("/v1/models/%66ake-model", 200),
        ("//v1/models", 404),
        ("/v1//models", 404),
        ("/v1/models/", 404),
        ("/v1/./models", 404),
        ("/v1/../v1/models", 404),
        ("/v1/models;a=b", 404),
        ("/v1/models%00", 404),
        ("/V1/models", 404),
        (f"/v1/models/{MODEL}/", 404),
        ("/v1/models#a", 404),
        ("*", 404),
        ("/v1/models/%ff%fe", 404),
        ("/v1/models/%ed%a0%80", 404),
        ("/redoc", 404),
        ("/docs/oauth2-redirect", 404),
    ],
)
def test_a_path_is_taken_as_it_is_written(server: EngineServer, target: str, status: int) -> None:
    answer = raw(server, head(target, "Connection: close"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert status == 200 or b'{"error": {"message": ' in answer


@pytest.mark.parametrize(
    "method", ["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "OPTIONS", "FOO", "get"]
)
@pytest.mark.parametrize("target", ["/v1/models", CHAT])
def test_no_other_method_does_anything(server: EngineServer, method: str, target: str) -> None:
    overriding = ("X-HTTP-Method-Override: GET", "X-HTTP-Method: POST", "Connection: close")
    answer = raw(server, head(target, *overriding, method=method))
    assert answer.startswith(b"HTTP/1.1 405 ") and b"Method Not Allowed" in answer


@pytest.mark.parametrize(
    ("key", "opens"),
    [
        ("bearer k1", True),
        ("BEARER k2", True),
        ("Bearer  k1 ", True),
        ("Bearer\tk1", False),
        ("Basic azE6", False),
        ("k1", False),
        ("Bearer k1,k2", False),
        ('Bearer "k1"', False),
        ("Bearer k1 k2", False),
        ("Bearer K1", False),
        ("Bearer k1\xa0", False),
        ("Bearer", False),
        ("Bearer ", False),
        (None, False),
    ],
)
def test_a_key_opens_as_it_is_and_not_nearly(
    server: EngineServer, key: str | None, opens: bool
) -> None:
    answer = raw(
        server, head("/v1/models?api_key=k1", "X-Api-Key: k1", "Connection: close", key=key)
    )
    assert answer.startswith(b"HTTP/1.1 200 " if opens else b"HTTP/1.1 401 ")


def test_two_keys_are_none(server: EngineServer) -> None:
    answer = raw(server, head("/v1/models", "Authorization: Bearer k1", "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "TLS/1.2"])
def test_an_upgrade_is_passed_over_and_the_connection_goes_on(
    server: EngineServer, upgrade: str
) -> None:
    asks = (
        f"Upgrade: {upgrade}",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    answer = raw(server, head("/v1/models", *asks), head("/version", "Connection: close"))
    assert answer.count(b"HTTP/1.1 200 ") == 2 and b'"version":' in answer


@pytest.mark.parametrize(
    "line",
    [
        "Range: bytes=0-3",
        "If-None-Match: *",
        "If-Modified-Since: Mon, 23 Nov 2099 14:00:00 GMT",
        "TE: trailers",
    ],
)
def test_an_answer_is_whole_whatever_part_is_asked_for(server: EngineServer, line: str) -> None:
    answer = raw(server, head("/v1/models", line, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"owned_by":"tangram"' in answer


def test_who_asks_before_sending_is_told_at_once(server: EngineServer) -> None:
    expecting = ("Expect: 100-continue", "Content-Type: application/json", "Connection: close")
    body = json.dumps(chat_body()).encode()
    assert raw(
        server, head(CHAT, *expecting, f"Content-Length: {len(body)}", method="POST"), body=body
    ).startswith(b"HTTP/1.1 100 Continue")
    for key, size, status in (("Bearer k1", 10**9, 413), (None, 100, 401)):
        refused = raw(
            server, head(CHAT, *expecting, f"Content-Length: {size}", method="POST", key=key)
        )
        assert refused.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("origin", "method", "status"),
    [
        (ORIGIN, "POST", 200),
        ("https://b.example", "POST", 400),
        ("null", "POST", 400),
        (ORIGIN, "DELETE", 400),
        (f"{ORIGIN}.evil.example", "POST", 400),
        (ORIGIN.upper(), "POST", 400),
        (f"{ORIGIN}:443", "POST", 400),
    ],
)
def test_a_page_may_ask_where_its_origin_may(
    server: EngineServer, origin: str, method: str, status: int
) -> None:
    asks = {"Origin": origin, "Access-Control-Request-Method": method}
    answer = httpx.options(server.url + CHAT, headers=asks)
    assert answer.status_code == status
    assert (answer.headers.get("access-control-allow-origin") == origin) == (origin == ORIGIN)


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
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )
    assert "half a surrogate pair" in error["message"]
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": spelled}
    answer = client.post("/v1/responses", json={"model": MODEL, "input": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].arguments")


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
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": "20"}, "max_tokens: Input should be a valid integer, it is '20'"),
        ({"max_tokens": 2.5}, "max_tokens: Input should be a valid integer, it is 2.5"),
        ({"temperature": True}, "temperature: Input should be a valid number, it is true"),
        ({"echo": "yes" * 99}, "echo: Input should be a valid boolean, it is 'yesyesyesyes"),
    ],
)
def test_the_value_of_another_kind_is_repeated(
    client: httpx.Client, fields: dict[str, Any], said: str
) -> None:
    answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"} | fields)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.startswith(said) and len(message) < 100


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions"])
def test_a_base_url_without_the_version_or_with_two_is_told(
    client: httpx.Client, path: str
) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    said = "/v1/chat/completions is there: end the client's base URL in /v1"
    assert said in answer.json()["error"]["message"]
    assert "base URL" not in client.post("/nowhere", json={}).text


def test_whatever_is_asked_for_metrics_have_an_end(client: httpx.Client) -> None:
    before = len(scrape(client))
    for number in range(50):
        client.request(f"FOO{number}", f"/nowhere/{number}")
        client.get(f"/v1/models/{number}")
    assert len(scrape(client)) - before <= 4
