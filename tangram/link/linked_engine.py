"""An engine of this process as API processes see theirs: for batches, and for one process."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from tangram.link.engine_port import MOST_STEP_S, EnginePort
from tangram.link.remote_engine import EngineNature, RemoteEngine
from tangram.web.desk import WebDesk

if TYPE_CHECKING:
    from tangram.engine.loop import Engine


class LinkedEngine(RemoteEngine):
    """`engine` at the other end of a pair of sockets, with what `desk` tells of it.

    The engine must not have started: it starts and stops with this object. A step that takes longer
    than `most_step_s` hangs.
    """

    def __init__(
        self, engine: Engine, desk: WebDesk | None = None, most_step_s: float = MOST_STEP_S
    ) -> None:
        super().__init__(EngineNature.of(engine), self._reach_port, lambda grace_s: None)
        self._port = EnginePort(engine, desk, most_step_s)
        self._serving: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        """See `ServedEngine`."""
        await super().start()
        self._port.start()

    def _reach_port(self) -> socket.socket:
        here, there = socket.socketpair()
        self._serving = asyncio.create_task(self._port.serve(there))
        return here

    async def stop(self) -> None:
        """See `ServedEngine`."""
        await super().stop()
        await asyncio.to_thread(self._port.engine.stop)
        self._port.close()
        if self._serving is not None:
            self._serving.cancel()
