"""HTTP as RFC 9110 and 9112 have it, byte by byte: targets, hosts, keys, origins, ends of
connections and what else clients seldom send.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from .conftest import (
    CHAT,
    MODEL,
    USER,
    EngineServer,
    chat_body,
    run_fake_server,
    scrape,
    wait_until,
)
from .test_stalling import connect, pages_held, request, rest

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
        (ORIGIN, "DELETE", 200),
        (ORIGIN, "PUT", 400),
        ("https://b.example", "DELETE", 400),
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


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions"])
def test_a_base_url_without_the_version_or_with_two_is_told(
    client: httpx.Client, path: str
) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert "base URL in /v1" in answer.json()["error"]["message"]
    assert "base URL" not in client.post("/nowhere", json={}).text


def test_whatever_is_asked_for_metrics_have_an_end(client: httpx.Client) -> None:
    before = len(scrape(client))
    for number in range(50):
        client.request(f"FOO{number}", f"/nowhere/{number}")
        client.get(f"/v1/models/{number}")
    assert len(scrape(client)) - before <= 4


GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKS = b"5\r\n[1,2]\r\n0\r\n\r\n"


def answers(server: EngineServer, *parts: bytes, ends: bool = False) -> bytes:
    """What comes until the server closes; with `ends`, after the client's side is closed."""
    with closing(connect(server)) as connection:
        for number, part in enumerate(parts):
            time.sleep(0.02 if number else 0)
            connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return rest(connection)


@pytest.mark.parametrize(
    "target",
    [
        "http://x/health",
        "HTTP://Elsewhere:8000/health",
        "https://[::1]:1/health",
        "http://u@x/health",
    ],
)
def test_a_target_may_have_its_host_before_the_path(
    shared_server: EngineServer, target: str
) -> None:
    answer = answers(shared_server, GET.replace(b"/health", target.encode(), 1))
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"status":"ok"' in answer


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://x", "/"),
        ("http://x?a=1", "/"),
        ("http://x/nowhere", "/nowhere"),
        ("ftp://x/health", "ftp://x/health"),
    ],
)
def test_a_target_is_what_follows_its_host(
    shared_server: EngineServer, target: str, path: str
) -> None:
    answer = answers(shared_server, GET.replace(b"/health", target.encode(), 1))
    assert answer.startswith(b"HTTP/1.1 404 ") and f"GET {path}: ".encode() in answer


@pytest.mark.parametrize(
    "target",
    [
        "http://x/metrics",
        "http://x/health",
        "http:///health",
        "http://x//health",
        "http://health/x",
    ],
)
def test_no_host_before_the_path_opens_a_locked_one(
    locked_server: EngineServer, target: str
) -> None:
    asked = GET.replace(b"/health", target.encode(), 1)
    assert answers(locked_server, asked).startswith(b"HTTP/1.1 401 ")
    asked = asked.replace(b"Host:", b"Authorization: Bearer sesame\r\nHost:")
    assert not answers(locked_server, asked).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("before", [b"\r\n", b"\r\n\r\n\r\n", b"\n", b"\r\n" * 30])
def test_empty_lines_before_a_request_are_passed_over(
    shared_server: EngineServer, before: bytes
) -> None:
    assert answers(shared_server, before + GET).startswith(b"HTTP/1.1 200 ")
    assert answers(shared_server, *(bytes([byte]) for byte in before), GET).startswith(
        b"HTTP/1.1 200 "
    )


def test_an_empty_line_after_a_body_is_passed_over(shared_server: EngineServer) -> None:
    first = request(chat_body(max_tokens=2))
    for parts in ((first + b"\r\n" + GET,), (first + b"\r\n", GET), (first, b"\r\n" + GET)):
        assert answers(shared_server, *parts).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", "/version", "/metrics", "/docs", "/openapi.json"]
)
def test_head_is_get_without_content(shared_server: EngineServer, path: str) -> None:
    with shared_server.http() as client:
        head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(whole.content))


def test_head_of_what_has_no_get(locked_server: EngineServer) -> None:
    with locked_server.http() as client:
        assert client.head("/metrics").status_code == 401
        key = {"Authorization": "Bearer sesame"}
        wrong = client.head(CHAT, headers=key)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert client.head("/nowhere", headers=key).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", [(), ("Connection: close",)])
def test_who_sends_no_more_gets_the_answer(
    fake_server: EngineServer, stream: bool, header: tuple[str, ...]
) -> None:
    asked = request(
        chat_body(stream=stream, messages=[USER | {"content": "a " * 100}], max_tokens=50), *header
    )
    answer = answers(fake_server, asked, ends=True)
    assert b"HTTP/1.1 200 " in answer and b'"finish_reason":"length"' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    wait_until(lambda: pages_held(fake_server) == 0, "pages are held")


def test_who_sends_no_more_in_the_middle_of_a_stream_gets_its_rest(
    fake_server: EngineServer,
) -> None:
    body = chat_body(max_tokens=None, stream=True, messages=[USER | {"content": "endless"}])
    with closing(connect(fake_server)) as connection:
        connection.sendall(request(body))
        assert b"HTTP/1.1 200 " in connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        until_s, received = time.monotonic() + 1.5, b""
        while time.monotonic() < until_s:
            received += connection.recv(1 << 16)
        assert received.count(b"data: ") > 50
        assert all(line[:1] in b":d\r0123456789abcdef" for line in received.split(b"\n") if line)
    wait_until(lambda: pages_held(fake_server) == 0, "the abandoned request still holds pages")


def test_who_sends_no_more_gets_all_answers(fake_server: EngineServer) -> None:
    asked = request(chat_body(max_tokens=5))
    assert (
        answers(fake_server, asked + asked + asked, ends=True).count(b'"finish_reason":"length"')
        == 3
    )
    assert (
        answers(fake_server, asked + asked[:50], ends=True).count(b'"finish_reason":"length"') == 1
    )
    begin_s = time.monotonic()
    cut = answers(fake_server, asked + asked[:-5], ends=True)
    assert cut.count(b'"finish_reason":"length"') == 1
    assert b"HTTP/1.1 400 " in cut and b"ended before the request's body" in cut
    assert time.monotonic() - begin_s < 10, "it is not waited for what cannot come"


@pytest.mark.parametrize("word", ["silent", "endless"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_has_gone_is_not_taken_for_one_who_waits(
    fake_server: EngineServer, word: str, stream: bool
) -> None:
    body = chat_body(max_tokens=None, stream=stream, messages=[USER | {"content": word}])
    for pause_s in (0.0, 0.1):
        with closing(connect(fake_server)) as connection:
            connection.sendall(request(body))
            if pause_s:
                wait_until(lambda: pages_held(fake_server) > 0, "the request did not begin")
                time.sleep(pause_s)
        time.sleep(0.1)
        wait_until(lambda: pages_held(fake_server) == 0, "the abandoned request still holds pages")


def test_who_waits_and_then_goes_is_seen_to_go(fake_server: EngineServer) -> None:
    with closing(connect(fake_server)) as connection:
        connection.sendall(
            request(chat_body(max_tokens=None, messages=[USER | {"content": "silent"}]))
        )
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: pages_held(fake_server) > 0, "the request did not begin")
        time.sleep(1.2)
        assert pages_held(fake_server) > 0
    wait_until(lambda: pages_held(fake_server) == 0, "the abandoned request still holds pages")


@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: 15\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 0",
        "transfer-encoding: CHUNKED\r\ncontent-length: 15",
    ],
)
def test_two_ends_of_a_body_are_refused_and_nothing_after_them_is_read(
    shared_server: EngineServer, lengths: str
) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n"
    ).encode()
    answer = answers(shared_server, head + CHUNKS + GET)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "Transfer-Encoding" in error["message"] and b"connection: close" in answer.lower()
