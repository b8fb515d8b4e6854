"""How the server's process ends: drained, at once, because its engine has died, or without it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn

from tangram.serve.bridge import ServedEngine
from tangram.serve.service import Service

_log = logging.getLogger(__name__)
# Long enough for running answers to end with an error, and for whoever watches /health to see why.
LAST_WORDS_S = 2.0
# Besides connections: weights, libraries, logs.
_OTHER_FILES = 1024


def allow_connections(most: int) -> None:
    """Let this process have as many open files as `most` connections need, as far as its hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES if hard == resource.RLIM_INFINITY else min(most + _OTHER_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Server(uvicorn.Server):
    """At the first SIGTERM or SIGINT it drains `service`, goes on listening, and ends when nothing runs any more or
    after `grace_s`; what runs then ends with an error. At the second it ends at once. When the engine dies it ends too.
    Where a step of the engine does not end, the process ends without it, with code 1. Once it answers it calls
    `on_ready`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServedEngine,
        service: Service,
        grace_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._engine, self._service, self._grace_s = engine, service, grace_s
        self._ends_s: float | None = None
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start the engine and take connections, then tell that."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal, or another one."""
        if self._ends_s is not None:
            os._exit(128 + sig)  # nothing may hold it up: no lock, no step of the engine, no client
        self._service.drain()
        self._ends_s = time.monotonic() + self._grace_s

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to end."""
        if not self._engine.healthy and self._ends_s is None:
            _log.error("the engine has stopped: the server ends")
            self._service.drain()
            self._ends_s = time.monotonic() + LAST_WORDS_S
        if self._ends_s is not None:
            # A dead engine's answers end by themselves; the time is for those who ask about it.
            drained = self._engine.healthy and not self.server_state.tasks
            self.should_exit |= drained or time.monotonic() >= self._ends_s
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Answers that still run when the time is over end with an error, not with a cut connection."""
        ending = asyncio.create_task(self._end_engine())
        await super().shutdown(sockets)
        ending.cancel()
        if self._service.stuck:
            _log.error("a step of the engine does not end: the process ends without it")
            os._exit(1)

    async def _end_engine(self) -> None:
        await asyncio.sleep(max(0.0, (self._ends_s or 0.0) - time.monotonic()))
        await asyncio.to_thread(self._service.stop)
