"""Runs a server: starts its engine, watches its API processes, and ends it with its requests."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tangram.errors import EngineError
from tangram.link.engine_port import EnginePort
from tangram.serve.activity import tell_activity

if TYPE_CHECKING:
    from tangram.link.api_process import ApiStart
    from tangram.link.api_processes import ApiProcesses

# When the server ends, it waits this long for the step under way.
LAST_STEP_S = 30
# An API process that ends this much later than it should, or not at all, is killed.
KILL_AFTER_S = 15.0
# A process that ends is started again. So many that end before they are ready end the server,
# unless another one answers. Then the next one starts after twice the time, up to a minute.
_MOST_FAILED_STARTS = 3
_AGAIN_AFTER_S = 1.0
_MOST_DOUBLINGS = 6
_LOOK_EVERY_S = 0.1
_log = logging.getLogger(__name__)


class Supervisor:
    """Serves the engine of `port`, which is not started, by API processes until a signal ends it.

    Running answers get `grace_s` after the signal, then they end with an error. API processes that
    do not end are killed `kill_after_s` later. A second signal ends all processes at once.
    `on_ready` is called when all API processes answer. `run` raises `EngineError` if the engine
    stops by itself, or if API processes cannot start.
    """

    def __init__(
        self,
        port: EnginePort,
        start: ApiStart,
        processes: ApiProcesses,
        on_ready: Callable[[], None],
        kill_after_s: float = KILL_AFTER_S,
    ) -> None:
        self._engine, self._port, self._start = port.engine, port, start
        self._processes, self._on_ready = processes, on_ready
        self._grace_s, self._kill_after_s = start.options.shutdown_grace_s, kill_after_s
        self._ends_s: float | None = None

    async def run(self) -> None:
        """Serve; call it in the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored, and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
                loop.add_signal_handler(number, self._take_signal, number)
        self._port.start()
        beside = [
            loop.create_task(tell_activity(self._engine.stats)),
            loop.create_task(self._tell_ready()),
            loop.create_task(self._kill_late()),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._processes)):
                    group.create_task(self._keep(place))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for task in beside:
                task.cancel()
            self._processes.kill()
            self._port.close()
            await self._end_engine()
        if not self._engine.healthy:
            raise EngineError(
                "the engine has stopped, its log has the reason: start the server again"
            )

    async def _keep(self, place: int) -> None:
        """Keep one API process running until the server ends."""
        failed = 0
        was_ready, ended = await self._see_through(place)
        while not self._is_ending:
            failed = 0 if was_ready else failed + 1
            if failed >= _MOST_FAILED_STARTS and not self._port.ready:
                raise EngineError(f"an API process {ended}, {failed} times before it was ready")
            _log.error("an API process %s: its requests are aborted, another one starts", ended)
            await asyncio.sleep(_AGAIN_AFTER_S * 2 ** min(failed, _MOST_DOUBLINGS))
            if self._is_ending:
                return
            try:
                self._processes.start_again(place)
                was_ready, ended = await self._see_through(place)
            except OSError as error:
                was_ready, ended = False, f"could not be started ({error})"

    async def _see_through(self, place: int) -> tuple[bool, str]:
        """Serve an API process until it has ended: whether it ever answered, and how it ended."""
        process = self._processes[place]
        # In a thread: it takes megabytes from the pipe only when it has imported all.
        connection = await asyncio.to_thread(process.begin, self._start)
        was_ready = await self._port.serve(connection)
        return was_ready, await asyncio.to_thread(process.wait, self._kill_after_s)

    async def _kill_late(self) -> None:
        """When the server ends, kill API processes that do not end with it."""
        ends_s = math.inf
        while time.monotonic() < ends_s + self._kill_after_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            if not self._engine.healthy:
                ends_s = min(ends_s, time.monotonic())
            elif self._ends_s is not None:
                ends_s = self._ends_s
        _log.error("an API process does not end: it is killed")
        self._processes.kill()

    @property
    def _is_ending(self) -> bool:
        return self._ends_s is not None or not self._engine.healthy

    async def _tell_ready(self) -> None:
        while self._port.ready < len(self._processes):
            await asyncio.sleep(_LOOK_EVERY_S)
        if not self._is_ending:
            self._on_ready()

    def _take_signal(self, number: int) -> None:
        """Drain at the first signal, exit at the next."""
        again = self._ends_s is not None
        if again and number == signal.SIGHUP:  # kernel and shell may both say so
            return
        if again:
            self._processes.kill()
            os._exit(128 + number)  # nothing may hold it up: no lock and no step of the engine
        self._ends_s = time.monotonic() + self._grace_s
        self._port.drain(self._grace_s)
        if running := self._port.answers:
            _log.info(
                "waiting up to %g s for %s, %s again ends the process",
                self._grace_s,
                f"{running} answers" if running > 1 else "an answer",
                "Ctrl-C" if number == signal.SIGINT else "a signal",
            )

    async def _end_engine(self) -> None:
        """End the engine's thread after its step; the process, if the step does not end."""
        stopping = asyncio.to_thread(self._engine.stop)
        try:
            await asyncio.wait_for(stopping, LAST_STEP_S)
        except TimeoutError:
            _log.error("a step of the engine does not end: the process ends without it")
            os._exit(1)
