"""What RFC 9110 and 9112 allow a client and others seldom send, byte by byte."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing

import pytest

from .conftest import CHAT, USER, EngineServer, chat_body, wait_until
from .test_stalling import connect, pages_held, request, rest

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
