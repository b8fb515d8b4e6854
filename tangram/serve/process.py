"""How the server's process ends: after its requests, at a second signal, or with its engine."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
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
# Enough time for running answers to end with an error, and for monitors to read /health.
LAST_WORDS_S = 2.0
# Open files besides connections and what is open already: libraries, logs, trials of grammars.
_OTHER_FILES = 128
_BACKLOG = 2048  # so many connections asyncio may accept before one of them is looked at


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and how many may wait to be accepted.

    Each takes an open file.
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
        available = allowed - taken
        backlog = min(_BACKLOG, available // 4)
        if backlog < 1:
            raise ConfigError(
                f"the process may open {hard} files, {taken} are needed besides connections: raise "
                "`ulimit -n`"
            )
        if available < wanted - taken:
            _log.warning(
                "the limit of open files (%d) allows %d connections", hard, available - backlog
            )
        return cls(available - backlog, backlog)


class Server(uvicorn.Server):
    """A server that ends when its requests have ended.

    At the first signal it drains `service`, but goes on listening, and says for how many answers it
    waits. It ends when no request runs, or after `grace_s`; then running requests get an error. A
    second signal ends the process at once. When the engine dies, the server ends too. If a step of
    the engine does not end, the process exits with code 1. It calls `on_ready` once it answers
    requests.
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
        self._untold_signal: int | None = None
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start the engine, accept connections, then call `on_ready`."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at the next."""
        if self._ends_s is not None:
            os._exit(128 + sig)  # nothing may hold it up: no lock, no step of the engine, no client
        self._service.drain()
        self._ends_s = time.monotonic() + self._grace_s
        self._untold_signal = sig  # the loop says so: here a line may be half written

    def hang_up(self, sig: int, frame: FrameType | None) -> None:
        """As at the first signal: the terminal is closed.

        Kernel and shell may both say so.
        """
        if self._ends_s is None:
            self.handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end; called ten times a second."""
        if not self._engine.healthy and self._ends_s is None:
            _log.error("the engine has stopped: the server ends")
            self._service.drain()
            self._ends_s = time.monotonic() + LAST_WORDS_S
        self._tell_signal()
        if self._ends_s is not None:
            # A dead engine's answers end by themselves. The time is for requests of /health.
            drained = self._engine.healthy and not self.server_state.tasks
            self.should_exit |= drained or time.monotonic() >= self._ends_s
        return await super().on_tick(counter)

    def _tell_signal(self) -> None:
        """Say once for what it waits."""
        sig, self._untold_signal = self._untold_signal, None
        running = len(self.server_state.tasks)
        if sig is None or not running:
            return
        _log.info(
            "waiting up to %g s for %s, %s again ends the process",
            self._grace_s,
            f"{running} answers" if running > 1 else "an answer",
            "Ctrl-C" if sig == signal.SIGINT else "a signal",
        )

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Give an error to answers that still run, so that no connection is just cut."""
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
