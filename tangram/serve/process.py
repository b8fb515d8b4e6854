"""How the server's process ends: drained, at once, because its engine has died, or without it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from types import FrameType

import uvicorn

from tangram.errors import ConfigError
from tangram.serve.bridge import ServedEngine
from tangram.serve.service import Service
from tangram.serve.wire import HttpProtocol

_log = logging.getLogger(__name__)
# Long enough for running answers to end with an error, and for whoever watches /health to see why.
LAST_WORDS_S = 2.0
# Besides connections and what is open already: libraries, logs, the trials of grammars.
_OTHER_FILES = 128
_BACKLOG = 2048  # so many connections asyncio may accept before one of them is looked at


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and how many may wait to be accepted. Each takes an open
    file.
    """

    connections: int
    backlog: int

    @classmethod
    def raise_limits(cls, most: int) -> ConnectionLimits:
        """Raise this process's limit of open files for `most` connections; what its hard limit
        leaves of them.

        Raises `ConfigError` where that is not even one.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = len(list(Path("/dev/fd").iterdir())) + _OTHER_FILES
        wanted = most + _BACKLOG + taken
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        room = allowed - taken
        backlog = min(_BACKLOG, room // 4)
        if backlog < 1:
            raise ConfigError(
                f"the process may open {hard} files, {taken} are needed besides connections: raise "
                "`ulimit -n`"
            )
        if room < wanted - taken:
            _log.warning(
                "the limit of open files (%d) leaves room for %d connections", hard, room - backlog
            )
        return cls(room - backlog, backlog)


class Server(uvicorn.Server):
    """At the first signal to end it drains `service`, goes on listening, and ends when nothing runs
    any more or after `grace_s`; what runs then ends with an error. At the second it ends at once.
    When the engine dies it ends too. Where a step of the engine does not end, the process ends
    without it, with code 1. Once it answers it calls `on_ready`.
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

    def hang_up(self, sig: int, frame: FrameType | None) -> None:
        """The terminal has gone: as the first of the others. It is told of more than once, by
        kernel and shell.
        """
        if self._ends_s is None:
            self.handle_exit(sig, frame)

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
        """Answers that still run when the time is over end with an error, not with a cut
        connection.
        """
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.refuse_rest()
        ending = asyncio.create_task(self._end_engine())
        await super().shutdown(sockets)
        ending.cancel()
        if self._service.stuck:
            _log.error("a step of the engine does not end: the process ends without it")
            os._exit(1)

    async def _end_engine(self) -> None:
        await asyncio.sleep(max(0.0, (self._ends_s or 0.0) - time.monotonic()))
        await asyncio.to_thread(self._service.stop)
