"""Work for a request before it enters the queue: parsing, rendering, tokenizing, grammars.

Each kind has threads of its own, and the number of requests in it is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from fastapi import Request

from tangram.engine.text.templates import PROCESSES
from tangram.errors import OverloadError, RequestError
from tangram.serve.answers.bridge import Limits, ServedEngine, make_timeout_error
from tangram.serve.observability.record import record_in
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Grammar

P = ParamSpec("P")
T = TypeVar("T")
_MOST_COMPILING_S = 40  # its trial has ended, unless the machine is stuck
# Each may take seconds, and they run one after the other, so their number bounds the wait.
_MOST_NEW_GRAMMARS = 32
# Preparation takes little time. The engine's queue says how long it takes itself.
_RETRY_AFTER_S = 1


class WorkThreads(ThreadPoolExecutor):
    """The threads for one kind of work."""

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`; cancelled work that has not begun never does."""
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))


@dataclass
class _Trial:
    """A grammar that is being compiled, and how many requests wait for it."""

    task: asyncio.Task[Grammar]
    awaited: int = 0


class Preparation:
    """Prepares requests. Meanwhile they count as waiting, and their time limit runs.

    Requests that wait for a new grammar are counted apart, so slow grammars keep no other request
    out.
    """

    def __init__(self, engine: ServedEngine, limits: Limits) -> None:
        self._engine, self._limits, self._here = engine, limits, 0
        # On the event loop a long prompt would delay every stream. One thread: tokenizers have
        # state.
        self.tokenizer = WorkThreads(1, "tokenizer")
        # One thread, so only one large body at a time takes memory.
        self.parser = WorkThreads(1, "parser")
        # Each waits for one of the processes in which the codec renders conversations.
        self.renderer = WorkThreads(PROCESSES, "renderer")
        self._compiler = WorkThreads(1, "grammar")
        self._compiling = asyncio.Lock()
        self._trials: dict[tuple[str, str], _Trial] = {}

    async def of(
        self,
        request: Request,
        work: Callable[P, Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """The result of `work`; it is cancelled at a disconnect or after `request_timeout_s`.

        Raises `OverloadError` at once if too many requests wait, those in preparation included.
        Raises `ApiError` 499 or 504 for cancelled work.
        """
        most, limit_s = self._limits.max_queue, self._limits.request_timeout_s
        here = self._here - self._awaiting
        if most is not None and here > 0 and here + self._engine.waiting >= most:
            raise OverloadError(
                f"{most} requests wait or are prepared (max_queue): try again later", _RETRY_AFTER_S
            )
        self._here += 1
        try:
            async with asyncio.timeout(
                None if limit_s is None else limit_s - record_in(request.scope).duration_s
            ):
                return await unless_disconnected(request, work(*args, **kwargs))
        except TimeoutError as error:
            raise make_timeout_error(limit_s) from error
        finally:
            self._here -= 1

    async def grammar(self, source: str, field: str) -> Grammar:
        """The compiled grammar, at once if it is known. Requests for the same grammar share the
        work.

        Raises as `GrammarCompiler.compile` does, and `RequestError` if it takes too long. Raises
        `OverloadError` at once if too many new grammars are waiting, or too many requests for them.
        """
        known = self._engine.grammars.look_up(source, field)
        if known is not None:
            return known
        key = source, field
        self._refuse_crowd(key)
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = _Trial(asyncio.create_task(self._compile(source, field)))
        trial.awaited += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.awaited -= 1
            if not trial.awaited:  # no request waits for it
                trial.task.cancel()
                del self._trials[key]

    @property
    def _awaiting(self) -> int:
        """The requests that wait for new grammars."""
        return sum(trial.awaited for trial in self._trials.values())

    def _refuse_crowd(self, key: tuple[str, str]) -> None:
        most = self._limits.max_queue
        if most is None:
            return
        if self._awaiting >= most or (
            key not in self._trials and len(self._trials) >= _MOST_NEW_GRAMMARS
        ):
            raise OverloadError(
                f"{self._awaiting} requests wait for {len(self._trials)} new grammars, at most "
                f"{most} (max_queue) may wait, for at most {_MOST_NEW_GRAMMARS}: try again later; "
                "requests without a grammar, or with a cached one, are accepted",
                self._engine.grammars.most_trial_s,  # then the one that is tried has ended
                "grammar_queue_full",
            )

    async def find_faults(self, sources: Sequence[str], field: str) -> Mapping[int, str]:
        """Which of `sources` are no grammars, by their places, and why. Raises as `grammar`."""
        return await self._try(field, self._engine.grammars.find_faults, sources)

    async def _compile(self, source: str, field: str) -> Grammar:
        return await self._try(field, self._engine.grammars.compile, source, field)

    async def _try(self, field: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` on a grammar in `field`, one after the other."""
        loop = asyncio.get_running_loop()

        def free(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._compiling.release)

        # The time limit excludes the wait for other grammars. The lock is free when the thread is.
        await self._compiling.acquire()
        future = self._compiler.submit(work, *args, **kwargs)
        future.add_done_callback(free)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _MOST_COMPILING_S)
        except TimeoutError as error:
            message = (
                f"{field} takes longer than {_MOST_COMPILING_S} s to make a grammar of: make it "
                "simpler"
            )
            raise RequestError(message, field) from error

    def stop(self) -> None:
        """Start no more work."""
        for pool in (self.parser, self.renderer, self.tokenizer, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)
        self._engine.codec.close()  # the process need not wait for what is rendered


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled if the client disconnects first.

    Then `ApiError` (499) is raised, else what `work` raises.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
