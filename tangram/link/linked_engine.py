"""An engine of this process as API processes see theirs: for batches, and where one is enough."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from tangram.link.engine_port import MOST_STEP_S, EnginePort
from tangram.link.remote_engine import EngineNature, RemoteEngine
from tangram.web.desk import PageDesk

if TYPE_CHECKING:
    from tangram.engine.loop import Engine


class LinkedEngine(RemoteEngine):
    """`engine` at the other end of a pair of sockets, with what `desk` tells of it.

    The engine must not have started: it starts and stops with this one. A step that takes longer
    than `most_step_s` hangs.
    """

    def __init__(
        self, engine: Engine, desk: PageDesk | None = None, most_step_s: float = MOST_STEP_S
    ) -> None:
        here, self._there = socket.socketpair()
        super().__init__(EngineNature.of(engine), here, lambda grace_s: None)
        self._own, self._desk = engine, desk
        self._port = EnginePort(engine, desk, most_step_s)
        self._beside: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """See `ServedEngine`."""
        self._beside = [
            asyncio.create_task(self._port.serve(self._there)),
            asyncio.create_task(self._port.watch()),
        ]
        if self._desk is not None:
            self._desk.start()
        await super().start()
        self._own.start()

    async def stop(self) -> None:
        """See `ServedEngine`."""
        await super().stop()
        await asyncio.to_thread(self._own.stop)
        if self._desk is not None:
            self._desk.close()
        self._port.close()
        for task in self._beside:
            task.cancel()
