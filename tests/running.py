"""uvicorn in a thread, for tests of what it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import socket
from types import SimpleNamespace
from typing import Any

import uvicorn

# uvicorn sleeps for a tenth of a second, twice or more, before it ends: a hundredth is enough here.
uvicorn.server.asyncio = SimpleNamespace(  # type: ignore[attr-defined]
    **vars(asyncio) | {"sleep": lambda delay_s: asyncio.sleep(delay_s / 10)}
)


@dataclass(frozen=True)
class RunningApp:
    """The address of a server on the loopback, and what ends it."""

    url: str
    stop: Callable[[], None]


@contextmanager
def run_app(app: Any, sockets: Sequence[socket] = (), **options: Any) -> Iterator[RunningApp]:
    """`app` on a free port, or on `sockets`, with uvicorn's `options`, until the end."""
    defaults: dict[str, Any] = {
        **{"port": 0, "log_level": "critical", "timeout_graceful_shutdown": 1},
        "loop": "asyncio",  # the server's
    }
    server = uvicorn.Server(uvicorn.Config(app, **(defaults | options)))
    thread = threading.Thread(target=server.run, args=(list(sockets) or None,))
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()

    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.005)
        listener = sockets[0] if sockets else server.servers[0].sockets[0]
        yield RunningApp(f"http://127.0.0.1:{listener.getsockname()[1]}", stop)
    finally:
        stop()
