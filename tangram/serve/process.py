"""How the server's process ends: after its requests, at a second signal, or with its engine."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket
from types import FrameType

import uvicorn

from tangram.errors import ConfigError
from tangram.serve.service import Service
from tangram.serve.transport.wire import HttpProtocol

_log = logging.getLogger(__name__)
# Enough time for running answers to end with an error, and for monitors to read /health.
LAST_WORDS_S = 2.0
# Who does not read the end of an answer in this time after the grace is cut off.
_CUT_AFTER_GRACE_S = 10.0
# Open files besides connections and what is open already: libraries, logs, trials of grammars.
_OTHER_FILES = 128
_BACKLOG = 2048  # so many connections asyncio may accept before one of them is looked at


def raise_file_limit(most: int) -> tuple[int, int]:
    """Raise this process's limit of open files for `most` connections, each of which takes one.

    Returns how many connections there may be, and how many may wait to be accepted, by the hard
    limit. Raises `ConfigError` where that is no connection at all.
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
    return available - backlog, backlog


class Server(uvicorn.Server):
    """A server that ends when its requests have ended.

    At the first signal, or by `drain`, it drains `service`, but goes on listening. It ends when no
    request runs, or after `grace_s`; then running requests get an error, and clients `cut_after_s`
    to read it. A second signal ends the process at once. When the engine dies, the server ends too.
    It calls `on_ready` once it answers requests.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        grace_s: float,
        on_ready: Callable[[], None],
        cut_after_s: float = _CUT_AFTER_GRACE_S,
    ) -> None:
        super().__init__(config)
        self._service, self._grace_s, self._cut_after_s = service, grace_s, cut_after_s
        self._ends_s: float | None = None
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start the engine, accept connections, then call `on_ready`."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at the next."""
        if self._ends_s is not None:
            os._exit(128 + sig)  # nothing may hold it up: no lock and no client
        self.drain(self._grace_s)

    def drain(self, grace_s: float) -> None:
        """Take no new requests, and end within `grace_s`, or earlier if that was said before."""
        self._service.drain()
        ends_s = time.monotonic() + grace_s
        self._ends_s = ends_s if self._ends_s is None else min(self._ends_s, ends_s)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end; called ten times a second."""
        if self._service.engine.ended:
            self.drain(LAST_WORDS_S)
        if self._ends_s is not None:
            # A dead engine's answers end by themselves. The time is for requests of /health.
            drained = not (
                self._service.engine.ended or self._service.memory.busy or self.server_state.tasks
            )
            self.should_exit |= drained or time.monotonic() >= self._ends_s
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Give an error to answers that still run, so that no connection is just cut."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.refuse_rest()
        left_s = 0.0 if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())
        self.config.timeout_graceful_shutdown = math.ceil(left_s + self._cut_after_s)
        ending = asyncio.create_task(self._end_answers(left_s))
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self, left_s: float) -> None:
        await asyncio.sleep(left_s)
        await self._service.stop()
