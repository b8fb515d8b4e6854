"""Clients that stall, leave or send nonsense in the middle: none keeps a connection or a page for
long.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tangram.link.linked_engine import LinkedEngine
from tangram.serve.http import build_app, transport_options
from tangram.serve.transport import wire
from tangram.serve.transport.listening import Listener
from tangram.serve.transport.wire import HttpProtocol
from tests.running import run_app

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, wait_until
from .fake_engine import FakeEngine
from .tiny import COMPLETIONS, TinyServer, body, numbers, run_tiny_server, tiny_folder

ENDLESS = chat_body(max_tokens=None, messages=[USER | {"content": "endless"}])


def connect(server: EngineServer | TinyServer, receive_bytes: int | None = None) -> socket.socket:
    """A connection that has sent nothing."""
    connection = socket.socket()
    connection.settimeout(10)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    return connection


def request(content: dict[str, Any], *headers: str, path: str = CHAT) -> bytes:
    data = json.dumps(content).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = bytearray()
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def pages_held(server: EngineServer) -> int:
    return server.engine.stats().pages_held


@pytest.mark.parametrize("word", ["endless", "silent"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("header", [(), ("Connection: close",)])
def test_who_sends_more_and_then_leaves_is_seen_to_leave(
    fake_server: EngineServer, word: str, stream: bool, header: tuple[str, ...]
) -> None:
    with closing(connect(fake_server)) as connection:
        asked = chat_body(max_tokens=None, stream=stream, messages=[USER | {"content": word}])
        connection.sendall(request(asked, *header))
        wait_until(lambda: pages_held(fake_server) > 0, "the request did not begin")
        connection.sendall(b"G")
        time.sleep(0.05)
    wait_until(lambda: pages_held(fake_server) == 0, "the abandoned request still holds pages")


def test_who_sends_more_and_leaves_the_queue_is_never_computed(tmp_path: Path) -> None:
    with run_tiny_server(tiny_folder(tmp_path), max_num_seqs=1) as server:
        with closing(connect(server)) as running, closing(connect(server)) as queued:
            running.sendall(request(body(numbers(20), max_tokens=3000), path=COMPLETIONS))
            wait_until(lambda: server.engine.stats().running == 1, "the first does not run")
            queued.sendall(request(body(numbers(20, 3), max_tokens=2000), path=COMPLETIONS))
            wait_until(lambda: server.engine.stats().waiting == 1, "the second does not wait")
            queued.sendall(b"G")
            time.sleep(0.05)
            queued.close()
            wait_until(lambda: server.engine.stats().waiting == 0, "it still waits")
            assert server.engine.stats().running == 1
            running.sendall(b"G")
            time.sleep(0.05)
        server.check_baseline()
        assert server.engine.stats().generated_tokens < 3000, "it was computed to its end"


def test_a_request_that_was_sent_early_is_answered_in_its_turn(fake_server: EngineServer) -> None:
    with closing(connect(fake_server)) as connection:
        connection.sendall(
            request(chat_body(max_tokens=5)) + request(chat_body(max_tokens=5), "Connection: close")
        )
        answers = rest(connection)
    assert answers.count(b"HTTP/1.1 200") == answers.count(b'"finish_reason":"length"') == 2


def test_who_sends_on_and_on_instead_of_reading_is_cut(fake_server: EngineServer) -> None:
    with closing(connect(fake_server)) as connection:
        connection.sendall(request(ENDLESS))
        wait_until(lambda: pages_held(fake_server) > 0, "the request did not begin")
        connection.sendall(b"G" * 2 * wire.MAX_HEADER_BYTES)
        wait_until(lambda: pages_held(fake_server) == 0, "it is served on and on")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a"])
def test_a_head_that_does_not_come_is_not_waited_for(
    locked_server: EngineServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.5)
    with closing(connect(locked_server)) as connection:
        connection.sendall(sent)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"head took longer than 0.5 s" in answer


def trickle(connection: socket.socket, part: bytes) -> None:
    """Send `part` again and again until the other end has enough."""
    for _ in range(100):
        try:
            connection.sendall(part)
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("after 5 s it still listens")


@pytest.mark.parametrize("key", ["sesame", "wrong"])
def test_a_head_or_body_that_trickles_is_not_waited_for(
    locked_server: EngineServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong key the 401 is out long before."""
    monkeypatch.setattr(wire, "HEAD_S", 0.5)
    monkeypatch.setattr(wire, "BODY_S", 0.5)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    for sent, part in ((head, b"X: a\r\n"), (head + b"Content-Length: 1000\r\n\r\n", b" ")):
        with closing(connect(locked_server)) as connection:
            connection.sendall(sent)
            trickle(connection, part)
    with locked_server.http() as client:
        assert client.get("/health").status_code == 200


def test_neither_a_long_answer_nor_an_idle_connection_is_a_slow_request(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.3)
    monkeypatch.setattr(wire, "BODY_S", 0.3)
    with closing(connect(fake_server)) as connection:
        for _ in range(2):
            connection.sendall(
                request(chat_body(max_tokens=450, messages=[USER | {"content": "endless"}]))
            )
            received = b""
            while b'"length"' not in received:
                received += connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(0.6)


def test_beyond_the_bound_who_asks_for_nothing_leaves_first(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.HttpProtocol, "max_connections", 3)
    working = [connect(fake_server) for _ in range(2)]
    for number, connection in enumerate(working, 1):
        connection.sendall(request(ENDLESS))
        wait_until(lambda: fake_server.engine.stats().running == number, "it does not run")  # noqa: B023
    with closing(connect(fake_server)) as idle, fake_server.http() as client:
        assert client.get("/health").status_code == 200
        assert rest(idle) == b""
        working.append(connect(fake_server))  # in the place of the client, which has its answer
        working[-1].sendall(request(ENDLESS))
        wait_until(lambda: fake_server.engine.stats().running == 3, "it does not run")
    with closing(connect(fake_server)) as late:
        assert rest(late).startswith(b"HTTP/1.1 503 ")
    assert fake_server.engine.stats().running == 3
    for connection in working:
        connection.close()
    wait_until(lambda: pages_held(fake_server) == 0, "the abandoned requests still hold pages")


@pytest.mark.parametrize("wait", [True, False])
def test_nonsense_after_a_refusal_is_no_matter_for_the_log(
    locked_server: EngineServer, wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(connect(locked_server)) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        answer = connection.recv(1000) if wait else b""
        connection.sendall(b"zz\r\n\r\n")
        answer += rest(connection)
    assert answer.startswith(b"HTTP/1.1 40")
    assert not [
        record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info
    ]


def test_an_answer_that_nobody_takes_is_given_up(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STALLED_CLIENT_S", 1)
    large = chat_body(
        max_tokens=330,
        n=128,
        logprobs=True,
        top_logprobs=3,
        messages=[USER | {"content": "endless"}],
    )
    with closing(connect(fake_server, 2048)) as connection:
        connection.sendall(request(large))
        connection.settimeout(60)
        assert connection.recv(1, socket.MSG_PEEK)  # the answer has come, and its window stays shut
        time.sleep(6)
        answer = rest(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert len(body) < size


def test_a_body_does_not_wait_for_the_client_to_acknowledge_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nagle's algorithm, of the listener that `tangram serve` opens, would keep it up to 40 ms."""
    off, made = list[int](), HttpProtocol.connection_made

    def noting(protocol: HttpProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        connection = transport.get_extra_info("socket")
        off.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(HttpProtocol, "connection_made", noting)
    listener = Listener.at("127.0.0.1", 0)
    app = build_app(LinkedEngine(FakeEngine()), served_model_name=MODEL)
    with run_app(app, listener.sockets, **transport_options()):
        assert httpx.get(f"{listener.url}/version", timeout=20).status_code == 200
        assert off and all(off)
