"""What a request needs before the engine has it, tokens and a grammar: made on threads of their own, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from fastapi import Request

from tangram.errors import OverloadError, RequestError
from tangram.serve.bridge import Limits, ServedEngine, timed_out
from tangram.serve.errors import ApiError
from tangram.serve.record import record_of
from tangram.types import Grammar

P = ParamSpec("P")
T = TypeVar("T")
_MOST_COMPILING_S = 10
# Who is prepared is so quickly: the queue behind it says how long it takes itself.
_RETRY_AFTER_S = 1


class Preparation:
    """Requests on their way to the queue: they count as waiting, and their clock runs."""

    def __init__(self, engine: ServedEngine, limits: Limits) -> None:
        self._engine, self._limits, self._here = engine, limits, 0
        # Tokenizing a long prompt takes long enough to stall every stream; one thread, because tokenizers keep state.
        self._tokenizer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiling = asyncio.Lock()

    async def of(
        self, request: Request, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `work`, which is given up when the client hangs up or `request_timeout_s` are over.

        Raises `OverloadError` at once if with those that are here already as many wait as may, and `ApiError` 499 or
        504 for what was given up.
        """
        most, limit_s = self._limits.max_queue, self._limits.request_timeout_s
        if most is not None and self._here and self._here + self._engine.stats().waiting >= most:
            raise OverloadError(f"{most} requests wait or are prepared (max_queue): try again later", _RETRY_AFTER_S)
        self._here += 1
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s - record_of(request).duration_s):
                return await unless_disconnected(request, work(*args, **kwargs))
        except TimeoutError as error:
            raise timed_out(limit_s) from error
        finally:
            self._here -= 1

    async def tokenize(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` with the tokenizer; not begun if it is given up before its turn."""
        return await asyncio.wrap_future(self._tokenizer.submit(work, *args, **kwargs))

    async def grammar(self, source: str, field: str) -> Grammar:
        """The compiled grammar; raises as `Grammars.compile` does, and `RequestError` if it takes too long."""
        loop = asyncio.get_running_loop()

        def free(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                loop.call_soon_threadsafe(self._compiling.release)

        # Who waits for others is not slow himself: the place is free when the thread is, whoever has gone.
        await self._compiling.acquire()
        future = self._compiler.submit(self._engine.grammars.compile, source, field)
        future.add_done_callback(free)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _MOST_COMPILING_S)
        except TimeoutError as error:
            message = f"{field} takes longer than {_MOST_COMPILING_S} s to make a grammar of: make it simpler"
            raise RequestError(message, field) from error

    def stop(self) -> None:
        """Begin nothing any more."""
        for pool in (self._tokenizer, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up first."""
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
