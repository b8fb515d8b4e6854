"""Trials of an HTTP server, byte by byte: what clients and others send that no library sends."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from bench.serving.asgi_app import HOST, Running
from tangram.serve.transport.wire import BODY_S, HEAD_S, STALLED_CLIENT_S

POST = b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
SILENCE_S = 5.0


@dataclass(frozen=True)
class HttpTrial:
    """A trial of a server. It is passed if what `run` returns is one of `right`.

    With `ends` it ends the server, which must be its own.
    """

    what: str
    right: Sequence[str]
    why: str
    run: Callable[[Running], str]
    ends: bool = False


def _connect(at: Running, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(SILENCE_S)
    connection.connect((HOST, at.port))
    return connection


def _rest(connection: socket.socket) -> bytes:
    """What comes until the server closes, or nothing has come for `SILENCE_S`."""
    received = bytearray()
    with suppress(OSError):
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


def _talk(at: Running, *parts: bytes, ends: bool = False) -> bytes:
    with closing(_connect(at)) as connection:
        for number, part in enumerate(parts):
            time.sleep(0.05 if number else 0)
            with suppress(OSError):  # refused before it was sent
                connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return _rest(connection)


def _statuses(answer: bytes) -> str:
    """The statuses of the answers in `answer`, without those that are interim."""
    found = re.findall(r"HTTP/1\.[01] ([2-5]\d\d) ", answer.decode("latin-1"))
    return " ".join(found) or "none"


def _ask(*parts: bytes) -> Callable[[Running], str]:
    return lambda at: _statuses(_talk(at, *parts))


def _ask_each(before: bytes, *ends: bytes) -> Callable[[Running], str]:
    """The statuses of several requests, each once."""
    return lambda at: ", ".join(
        sorted({_statuses(_talk(at, before + end)) for end in ends}, reverse=True)
    )


def _trickle(before: bytes, part: bytes, limit_s: float) -> Callable[[Running], str]:
    """What a server does that gets `part` each second after `before`."""

    def run(at: Running) -> str:
        until_s = time.monotonic() + limit_s + 8
        with closing(_connect(at)) as connection:
            connection.sendall(before)
            connection.settimeout(1)
            received = b""
            while time.monotonic() < until_s:
                try:
                    if not (more := connection.recv(1 << 16)):
                        return _statuses(received) if received else "closed"
                    received += more
                except TimeoutError:
                    with suppress(OSError):
                        connection.sendall(part)
                except OSError:
                    return _statuses(received) if received else "closed"
        return f"waits over {limit_s + 7:.0f} s"

    return run


def _endless_head(at: Running) -> str:
    with closing(_connect(at)) as connection:
        connection.sendall(b"GET /json HTTP/1.1\r\nHost: x\r\n")
        with suppress(OSError):
            for _ in range(4096):
                connection.sendall(b"X: " + b"a" * 1019 + b"\r\n")
            return "takes 4 MiB"
        return _statuses(_rest(connection))


def _large_body(at: Running) -> str:
    head = POST + b"Content-Length: 1000000000000\r\nExpect: 100-continue\r\n\r\n"
    answer = _talk(at, head)
    return _statuses(answer) + (" after 100" if b" 100 " in answer else "")


def _post(path: str, **content: Any) -> bytes:
    body = json.dumps(content).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(body),
        body,
    )


def _count_open(at: Running, label: str) -> int:
    answer = _talk(at, GET.replace(b"/json", f"/open?{label}".encode()))
    return int(json.loads(answer[answer.index(b"{") : answer.index(b"}") + 1])["open"])


def _watch_leaving(at: Running, label: str, within_s: float) -> str:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if _count_open(at, label) == 0:
            return "noticed"
        time.sleep(0.1)
    return "not noticed"


def _leave(label: str, *, more: bytes = b"", ends: bool = False) -> Callable[[Running], str]:
    """Whether a server notices that a client has left, whose answer is still computed."""

    def run(at: Running) -> str:
        with closing(_connect(at)) as connection:
            connection.sendall(_post(f"/wait?{label}"))
            time.sleep(0.3)
            connection.sendall(more)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            time.sleep(0.7)
            if _count_open(at, label) == 0:
                return "cut before it left"
        return _watch_leaving(at, label, 3)

    return run


def _read_nothing(at: Running) -> str:
    with closing(_connect(at, 4096)) as connection:
        connection.sendall(_post("/stream?unread", events=10_000, bytes=1_000_000))
        time.sleep(2)
        return _watch_leaving(at, "unread", 2 * STALLED_CLIENT_S)


def _half_close(path: str, **content: Any) -> Callable[[Running], str]:
    def run(at: Running) -> str:
        answer = _talk(at, _post(path, **content), ends=True)
        whole = answer.endswith((b"0\r\n\r\n", b"}"))
        return _statuses(answer) + ("" if whole else " cut")

    return run


def _pipeline(at: Running) -> str:
    return _statuses(_talk(at, _post("/json") * 2 + GET))


def _absolute(at: Running) -> str:
    answer = _talk(at, GET.replace(b"/json", b"http://x/json"))
    return _statuses(answer) + ("" if b'"/json"' in answer else ", another path")


def _form(at: Running) -> str:
    answer = _talk(at, b"nonsense\r\n\r\n")
    return f"{_statuses(answer)} JSON" if b'{"error":' in answer else f"{_statuses(answer)} text"


def _stop_while_streaming(at: Running, between: Callable[[], object]) -> bytes:
    """The answer that is streamed while the server gets SIGTERM; `between` is called then."""
    with closing(_connect(at)) as connection:
        connection.sendall(_post("/stream", events=300, bytes=200))
        received = connection.recv(1)
        at.process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        between()
        return received + _rest(connection)


def _drain(at: Running) -> str:
    answer = _stop_while_streaming(at, lambda: None)
    return "whole" if answer.endswith(b"0\r\n\r\n") else "cut"


def _ask_while_draining(at: Running) -> str:
    found = []

    def ask() -> None:
        try:
            found.append(_statuses(_talk(at, GET)))
        except OSError:
            found.append("refused")

    _stop_while_streaming(at, ask)
    return found[0]


_BODY = b"5\r\n[1,2]\r\n0\r\n\r\n"
_BOTH = POST + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n" + _BODY + GET
_TWO_LENGTHS = POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n[1,2]\n" + GET
_LINE_FEEDS = GET.replace(b"\r\n", b"\n")
_UNSURE = "two readers see other ends"
_HELD = "who sends little holds a connection"
_GONE = "nobody waits for the tokens"

TRIALS = [
    HttpTrial(
        "a header of 64 KiB",
        ["431"],
        "memory",
        _ask(GET[:-2] + b"X: " + b"a" * 65_536 + b"\r\n\r\n"),
    ),
    HttpTrial("headers without end", ["431", "400", "closed"], "memory", _endless_head),
    HttpTrial(
        f"a head that trickles, {HEAD_S} s",
        ["408", "closed"],
        _HELD,
        _trickle(GET[:-2], b"X: a\r\n", HEAD_S),
    ),
    HttpTrial(
        f"a body that trickles, {BODY_S} s",
        ["408", "closed"],
        _HELD,
        _trickle(POST + b"Content-Length: 1000\r\n\r\n", b" ", BODY_S),
    ),
    HttpTrial(
        "Transfer-Encoding and Content-Length",
        ["400", "200"],
        f"RFC 9112, 6.1: {_UNSURE}",
        _ask(_BOTH),
    ),
    HttpTrial("two Content-Lengths", ["400"], f"RFC 9112, 6.3: {_UNSURE}", _ask(_TWO_LENGTHS)),
    HttpTrial(
        "chunk sizes zz, -5, 0x5, 2^84",
        ["400"],
        f"RFC 9112, 7.1: {_UNSURE}",
        _ask_each(CHUNKED, *(size + _BODY[1:] for size in (b"zz", b"-5", b"0x5", b"F" * 21))),
    ),
    HttpTrial("chunks with LF alone", ["400"], _UNSURE, _ask(CHUNKED + b"5\n[1,2]\n0\n\r\n")),
    HttpTrial("a head with LF alone", ["200", "400"], "RFC 9112, 2.2: may", _ask(_LINE_FEEDS)),
    HttpTrial(
        "a space before the colon, NUL in a value",
        ["400"],
        "RFC 9112, 5.1; RFC 9110, 5.5",
        _ask_each(GET[:-2], b"Content-Length : 0\r\n\r\n", b"X: a\0b\r\n\r\n"),
    ),
    HttpTrial(
        "Transfer-Encoding: xchunked",
        ["400", "501"],
        "RFC 9112, 6.1",
        _ask(POST + b"Transfer-Encoding: xchunked\r\nConnection: close\r\n\r\n" + _BODY),
    ),
    HttpTrial(
        "10^12 bytes, Expect: 100-continue", ["413"], "a refusal before the body", _large_body
    ),
    HttpTrial("a client that reads nothing", ["noticed"], "memory", _read_nothing),
    HttpTrial(
        "half-closed, a stream",
        ["200"],
        "the client waits",
        _half_close("/stream", events=50, bytes=200),
    ),
    HttpTrial("a client leaves", ["noticed"], _GONE, _leave("leaves")),
    HttpTrial("it sends a byte and leaves", ["noticed"], _GONE, _leave("more", more=b"G")),
    HttpTrial("it half-closes, waits, leaves", ["noticed"], _GONE, _leave("ends", ends=True)),
    HttpTrial("empty lines before a request", ["200"], "RFC 9112, 2.2", _ask(b"\r\n" + GET)),
    HttpTrial(
        "an empty line after a body",
        ["200 200"],
        "RFC 9112, 2.2",
        _ask(_post("/json") + b"\r\n" + GET),
    ),
    HttpTrial("three requests at once", ["200 200 200"], "RFC 9112, 9.3.2", _pipeline),
    HttpTrial("a target with its host", ["200"], "RFC 9112, 3.2.2", _absolute),
    HttpTrial("nonsense", ["400 JSON"], "one form of errors", _form),
    HttpTrial("SIGTERM during a stream", ["whole"], "nothing is lost", _drain, ends=True),
    HttpTrial(
        "a request after SIGTERM", ["200"], "probes read /ready", _ask_while_draining, ends=True
    ),
]
