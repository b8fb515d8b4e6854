"""A small application, under Tangram's server and others."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tangram.serve.http import transport_options
from tangram.serve.process import Server
from tangram.serve.service import Service
from tangram.serve.transport.guard import MAX_HEADER_BYTES, BoundRequests
from tangram.serve.transport.listening import Listener
from tangram.serve.transport.wire import (
    HEAD_S,
    MAX_CONNECTIONS,
    HttpProtocol,
    find_connection,
    http_protocol,
)

TICK_S = 0.01
GRACE_S, START_S = 30, 60
MAX_BODY_BYTES = 1_000_000
HOST = "127.0.0.1"


class App:
    """`POST /stream` sends `events` of `bytes` each, one a tick for all clients at once, as an
    engine does after a step. `/wait` answers when its client has gone. `/open?NAME` counts the
    requests of these two that have the query NAME and are being answered. Other paths answer with
    themselves and the size of the body.
    """

    def __init__(self, *, direct: bool = False) -> None:
        self._direct = direct
        self._ticks = list[Callable[[], object]]()
        self._open = Counter[bytes]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or tick until the server ends."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        body, more = b"", True
        while more:
            if (message := await receive())["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message.get("more_body", False)
        path, query = scope["path"], scope["query_string"]
        if path not in ("/stream", "/wait"):
            open_requests = {"open": self._open[query]} if path == "/open" else {}
            answer = json.dumps({"path": path, "bytes": len(body), **open_requests}).encode()
            await _begin(send, b"application/json", (b"content-length", b"%d" % len(answer)))
            await send({"type": "http.response.body", "body": answer})
            return
        self._open[query] += 1
        work = {asyncio.create_task(_wait_until_gone(receive))}
        if path == "/stream":
            work.add(asyncio.create_task(self._stream(scope, send, **json.loads(body))))
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open[query] -= 1
            for task in work:
                task.cancel()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        ticking = asyncio.create_task(self._tick())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        ticking.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + TICK_S, loop.time())
            await asyncio.sleep(next_s - loop.time())
            due, self._ticks = self._ticks, []
            for follow in due:
                follow()

    async def _stream(self, scope: Scope, send: Send, *, events: int, bytes: int) -> None:
        event = b"data: " + b"x" * (bytes - 8) + b"\n\n"
        await _begin(send, b"text/event-stream")
        if self._direct and (body := find_connection(scope)) is not None:
            await self._pour(body, event, events)
        else:
            for _ in range(events):
                tick = asyncio.Event()
                self._ticks.append(tick.set)
                await tick.wait()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pour(self, body: HttpProtocol, event: bytes, events: int) -> None:
        """Write at each tick, without a task that wakes up, as `EventSource` does."""
        left, done = events, asyncio.Event()

        def pour() -> None:
            nonlocal left
            if body.writable:
                body.write(event)
                left -= 1
            if left:
                self._ticks.append(pour)
            else:
                done.set()

        self._ticks.append(pour)
        await done.wait()


async def _begin(send: Send, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    head = [(b"content-type", kind), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _NoEngine:
    """What `Server` asks of a service."""

    engine = SimpleNamespace(ended=False)

    def drain(self) -> None:
        """Nothing is queued."""

    async def stop(self) -> None:
        """Nothing runs."""


def make_app(*, direct: bool = False) -> ASGIApp:
    """The application behind the middleware of the server that belongs to HTTP."""
    return BoundRequests(App(direct=direct), MAX_BODY_BYTES)


def _run_tangram(port: int, *, direct: bool) -> None:
    options = transport_options(http_protocol(MAX_CONNECTIONS))
    config = uvicorn.Config(make_app(direct=direct), log_config=None, lifespan="on", **options)
    server = Server(config, cast("Service", _NoEngine()), GRACE_S, lambda: None)
    asyncio.run(server.serve(list(Listener.at(HOST, port).sockets)))


def _run_uvicorn(port: int, parser: Any) -> None:
    """Its bound of a head is the only option here that it has; it is h11's."""
    options = transport_options() | {"http": parser}
    uvicorn.run(
        make_app(),
        host=HOST,
        port=port,
        log_config=None,
        timeout_graceful_shutdown=GRACE_S,
        **options,
    )


def _run_hypercorn(port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind, config.errorlog = [f"{HOST}:{port}"], None
    config.h11_max_incomplete_size, config.read_timeout = MAX_HEADER_BYTES, HEAD_S
    config.graceful_timeout = GRACE_S
    asyncio.run(serve(make_app(), config))


def _run_granian(port: int) -> None:
    from granian.constants import Interfaces, Loops
    from granian.http import HTTP1Settings
    from granian.server import Server as Granian

    bounds = HTTP1Settings(header_read_timeout=HEAD_S * 1000, max_buffer_size=MAX_HEADER_BYTES)
    Granian(
        "bench.serving.asgi_app:make_app",
        **{"address": HOST, "port": port, "factory": True, "log_enabled": False},
        interface=Interfaces.ASGI,
        loop=Loops.asyncio,
        http1_settings=bounds,
        websockets=False,
        workers_kill_timeout=GRACE_S,
    ).serve()


# Name → the distribution that it needs beside uvicorn and h11, and what serves until a signal.
SERVERS: dict[str, tuple[str | None, Callable[[int], None]]] = {
    "tangram, written past ASGI": (None, lambda port: _run_tangram(port, direct=True)),
    "tangram, through ASGI": (None, lambda port: _run_tangram(port, direct=False)),
    "uvicorn, h11": (None, lambda port: _run_uvicorn(port, "h11")),
    "uvicorn, httptools": ("httptools", lambda port: _run_uvicorn(port, "httptools")),
    "uvicorn, zttp": ("zttp", lambda port: _run_uvicorn(port, "zttp")),
    "Hypercorn": ("hypercorn", _run_hypercorn),
    "Granian": ("granian", _run_granian),
}


@dataclass(frozen=True)
class Running:
    """A server that answers at a port of `HOST`, and its first process."""

    port: int
    process: psutil.Process


@contextmanager
def run_server(name: str) -> Iterator[Running]:
    """The server of that name, until the end."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.serving.asgi_app", name, str(port)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
    ) as started:
        try:
            _wait_until_open(started, port)
            yield Running(port, psutil.Process(started.pid))
        finally:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(started.pid).children(recursive=True):
                    process.kill()
            started.kill()


def _wait_until_open(started: subprocess.Popen[bytes], port: int) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and started.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server does not listen at {port}, its code is {started.poll()}")


if __name__ == "__main__":
    SERVERS[sys.argv[1]][1](int(sys.argv[2]))
