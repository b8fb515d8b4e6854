"""From the engine to its clients: one `EventStream` for each HTTP request.

However a stream ends, its pages are freed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tangram.metrics import EngineStats
from tangram.serve.observability.exposition import CompletionMeter, ServerMetrics
from tangram.serve.observability.record import Generation, Record
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Event, FinishReason, Request, SamplingValues

if TYPE_CHECKING:
    from tangram.engine.text.codec import TextCodec
    from tangram.engine.text.grammar import GrammarCompiler

# More completions than these are seldom in one step, so the bound on pending events stops growing.
_COUNTED_CHOICES = 8
PENDING_EVENTS = 512


@dataclass(frozen=True)
class Limits:
    """How long an answer may take, and how far a client may fall behind its stream.

    A request ends `request_timeout_s` after it arrived, time in the queue included; None is no
    limit. A stream ends when `pending_events` for each of its completions (at most eight count)
    wait for the client. `max_queue` is the engine's; requests in preparation count too, and None is
    no limit.
    """

    request_timeout_s: float | None = None
    pending_events: int = PENDING_EVENTS
    max_queue: int | None = None


class ServedEngine(Protocol):
    """An engine as the server sees it, from one event loop. It computes elsewhere.

    Events come on that loop. If it stops, by itself or by `stop`, every completion ends with an
    event. Nothing but `submit`, `start` and `stop` waits for a step.
    """

    codec: TextCodec
    grammars: GrammarCompiler
    max_model_len: int  # the most tokens, prompt and answer, of one sequence
    sampling: SamplingValues  # what holds where a request states nothing
    ended: bool  # whether it has stopped by itself, for good

    @property
    def waiting(self) -> int:
        """How many completions wait for a place in the batch."""

    @property
    def healthy(self) -> bool:
        """False once it has ended, or while a step of it does not end."""

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if `submit` would for `coming` completions."""

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; an unknown or finished request is ignored."""

    def stats(self) -> EngineStats:
        """The engine's statistics between two steps, as it has told last."""

    async def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; returns once they are in the queue.

        Raises `RequestError` if they can never be served, `OverloadError` if too many wait,
        `MachineError` if a grammar could not be tried, `EngineError` if the engine has stopped. If
        the caller is cancelled, they are aborted.
        """

    async def start(self) -> None:
        """Begin to serve."""

    async def stop(self) -> None:
        """End what runs. Safe to call twice."""


def make_timeout_error(limit_s: float | None) -> ApiError:
    """The error of a request that took longer than `limit_s`."""
    return ApiError(504, f"the request took longer than {limit_s} s, the most that it may here")


class EventStream:
    """The events of one generation, as (choice, event): made by `open`, taken one by one.

    A choice is the number of the prompt · n + the index of the completion. Always `close()` it:
    that aborts every completion that has not ended, and frees its pages. `overrun` is set if it was
    closed because the client does not read.
    """

    def __init__(self, engine: ServedEngine, generation: Generation, limits: Limits) -> None:
        self._engine, self.generation = engine, generation
        self._loop = asyncio.get_running_loop()
        self._pending = deque[tuple[int, Event] | ApiError]()
        self._tell: Callable[[], object] = lambda: None  # nobody follows yet
        most_pending = min(generation.choices, _COUNTED_CHOICES) * limits.pending_events
        self._most_pending = most_pending if generation.stream else None
        self._running: dict[int, CompletionMeter] = {}
        self.overrun = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._most_s = limits.request_timeout_s

    @classmethod
    async def open(
        cls,
        engine: ServedEngine,
        generation: Generation,
        metrics: ServerMetrics,
        limits: Limits,
        record: Record | None = None,
    ) -> EventStream:
        """Submit what `generation` requests; `record`, if it came by HTTP, has it from now on.

        Raises as `ServedEngine.submit` does, and `ApiError` 504.
        """
        stream, now_s = cls(engine, generation, limits), time.monotonic()
        ends_s = stream._choose_end(record)
        if record is not None:
            record.generation = generation
        samples = generation.first.sampling.n
        requests = [
            replace(request, on_event=partial(stream._enter, number * samples))
            for number, request in enumerate(generation.requests)
        ]
        try:
            async with asyncio.timeout_at(ends_s):
                await engine.submit(*requests)
        except TimeoutError as error:
            raise make_timeout_error(stream._most_s) from error
        if ends_s is not None:
            stream._timer = stream._loop.call_at(
                ends_s, stream.fail, make_timeout_error(stream._most_s)
            )
        stream._running = {
            choice: CompletionMeter(metrics, now_s) for choice in range(generation.choices)
        }
        return stream

    def _choose_end(self, record: Record | None) -> float | None:
        """When the request has taken too long, on the loop's clock."""
        if self._most_s is None:
            return None
        gone_s = 0.0 if record is None else record.duration_s
        return self._loop.time() + self._most_s - gone_s

    def _enter(self, first: int, event: Event) -> None:
        """Enter an event of the prompt whose choices begin at `first`, unless too many wait."""
        choice = first + event.index
        if self.overrun.is_set():
            return
        if self._most_pending is not None and len(self._pending) >= self._most_pending:
            self.overrun.set()
            self.close()
        else:
            self._pending.append((choice, event))
        self._tell()

    def fail(self, error: ApiError) -> None:
        """End the request. Its pages are free at the next step, however slow the client is."""
        self._pending.append(error)
        self._abort_unfinished()
        self._tell()

    def follow(self, tell: Callable[[], object]) -> None:
        """Call `tell` whenever there is more to take."""
        self._tell = tell

    @property
    def ended(self) -> bool:
        """Whether every completion has ended, and its end was taken."""
        return not self._running and not self.overrun.is_set()

    def take(self) -> tuple[int, Event] | None:
        """The next event; None until there is more.

        Raises `ApiError` if the engine gave up, or if the client did not read.
        """
        if not self._pending and not self.overrun.is_set():
            return None
        try:
            news = self._next()
        except ApiError as error:
            self.generation.failure = error.status
            raise
        self._measure(*news)
        return news

    def _next(self) -> tuple[int, Event]:
        if self.overrun.is_set():  # all is aborted, so the events left have no end
            raise ApiError(408, "too many events wait for the client: read them faster")
        news = self._pending.popleft()
        if isinstance(news, ApiError):
            raise news
        event = news[1]
        if event.error_field is not None:
            raise ApiError(400, event.error or "", param=event.error_field, code="invalid_value")
        if event.finish_reason is FinishReason.ABORT:
            raise ApiError(
                503 if event.may_retry else 500,
                event.error or "the engine ended the request: it is shutting down",
            )
        return news

    def _measure(self, choice: int, event: Event) -> None:
        now_s = time.monotonic()
        self.generation.note(choice, event, now_s)
        self._running[choice].take(event, now_s)
        if event.finish_reason is not None:
            del self._running[choice]

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        self._abort_unfinished()
        for choice, meter in self._running.items():
            self.generation.reasons[choice] = FinishReason.ABORT
            meter.end(FinishReason.ABORT, time.monotonic())
        self._running.clear()

    def _abort_unfinished(self) -> None:
        left = map(self.generation.request_of, sorted(self._running))
        for request_id in dict.fromkeys(request.request_id for request in left):
            self._engine.abort(request_id)
