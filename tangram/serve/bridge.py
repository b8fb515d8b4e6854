"""From the engine's thread to asyncio: one `EventStream` per HTTP request, which never leaves pages
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tangram.engine.text import TokenText
from tangram.errors import ConfigError
from tangram.metrics import EngineStats
from tangram.serve.api_errors import ApiError
from tangram.serve.exposition import CompletionMeter, ServerMetrics
from tangram.serve.record import Generation, Record
from tangram.types import (
    Event,
    FinishReason,
    Grammar,
    Marks,
    Request,
    SamplingParams,
    ThinkingFormat,
    ToolFormat,
)

HEALTH_CHECK_S = 1.0
# Of more completions hardly more than these are in one step: the bound on what waits for a client
# stops growing.
_COUNTED_CHOICES = 8


@dataclass(frozen=True)
class Limits:
    """How long an answer may take, and how far a client may fall behind one that is streamed to it.

    A request is ended `request_timeout_s` after it has come, waiting in the queue included; None
    never. A stream is ended when `pending_events` for each of its completions, of at most eight,
    wait for a client that does not read. `max_queue` is the engine's: who is on the way to the
    queue counts, too; None takes in everybody, those who wait for new grammars, too. Raises
    `ConfigError` where a number cannot be meant.
    """

    request_timeout_s: float | None = None
    pending_events: int = 512
    max_queue: int | None = None

    def __post_init__(self) -> None:
        timeout_s = self.request_timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ConfigError(
                f"request_timeout_s is {timeout_s}, it must be a positive number of seconds"
            )
        if self.pending_events < 1:
            raise ConfigError(f"pending_events is {self.pending_events}, it must be at least 1")


class Codec(Protocol):
    """Text to tokens and back, as the server needs it."""

    @property
    def longest_token_bytes(self) -> int:
        """No token is made of more bytes of text."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if it knows none, or writes them in an unknown
        way.
        """

    @property
    def thinking_format(self) -> ThinkingFormat | None:
        """How the model marks what it thinks; None if it does not, or in an unknown way."""

    @property
    def marks(self) -> Marks:
        """The control tokens that calls and thoughts are told by."""

    @property
    def control_token_ids(self) -> Sequence[int]:
        """The tokens that are no text and do not end one."""

    @property
    def template_options(self) -> frozenset[str]:
        """The variables of the model's chat template that a request may set."""

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to the answer; raises `RequestError` if the template
        rejects it.
        """

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name; raises `RequestError` (`field`) if one is not
        in the vocabulary.
        """

    def token_text(self, token_id: int) -> TokenText:
        """One token as `logprobs` reports it."""


class Grammars(Protocol):
    """The part of `tangram.engine.grammar.GrammarCompiler` that the server sees."""

    def warm(self) -> None:
        """Do now what the first grammar would wait for."""

    def look_up(self, source: str, field: str) -> Grammar | None:
        """What `compile` has made of the same before, or its `RequestError` again, at once; None if
        it is new.
        """

    def compile(self, source: str, field: str) -> Grammar:
        """A grammar in llguidance's Lark dialect, from any thread.

        Raises `RequestError` (`field`) if it is none, `MachineError` if that could not be found
        out.
        """


class ServedEngine(Protocol):
    """The part of `tangram.engine.loop.Engine` that the server sees. `submit` and `abort` may come
    from any thread.
    """

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""

    @property
    def grammars(self) -> Grammars:
        """What makes grammars for the model's tokens."""

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer, of one sequence."""

    @property
    def waiting(self) -> int:
        """How many completions wait for a place; asking takes no time."""

    @property
    def healthy(self) -> bool:
        """False once its thread has died."""

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; raises `RequestError` if they can never be served,
        `OverloadError` if too many wait.
        """

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; of an unknown or finished one, nothing."""

    def start(self) -> None:
        """Start the thread that serves."""

    def stop(self) -> None:
        """End that thread; what is in flight is aborted. Safe to call twice."""

    def stats(self) -> EngineStats:
        """The engine's books, between two steps."""


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine: `sampling.n` completions of each prompt, whole or
    as a `stream`.

    `record`, if the request came by HTTP, hears what comes of it, and gives the engine's log its
    name.
    """

    id: str
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    kv_retention: float | None
    cache_salt: str
    stream: bool = False
    grammar: Grammar | None = None
    record: Record | None = None
    marks: Marks = field(default_factory=Marks)

    @property
    def choices(self) -> int:
        """All completions."""
        return len(self.prompts) * self.sampling.n


def make_timeout_error(limit_s: float | None) -> ApiError:
    """The end of a request that took longer than `limit_s`."""
    return ApiError(504, f"the request took longer than {limit_s} s, the most that it may here")


class EventStream:
    """The events of one job, as (choice, event); choice = prompt number · n + index of the
    completion.

    Submits on construction (raises `RequestError` or `OverloadError` if the engine refuses, then
    nothing of it has begun). Whoever builds it must `close()` it: that aborts every completion that
    has not ended, which frees its pages. `overrun` is set when it was closed because nobody takes
    the events.
    """

    def __init__(
        self, engine: ServedEngine, job: Job, metrics: ServerMetrics, limits: Limits
    ) -> None:
        self._engine, self._job = engine, job
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event] | ApiError] = asyncio.Queue()
        self._most_pending = (
            min(job.choices, _COUNTED_CHOICES) * limits.pending_events if job.stream else None
        )
        self._running: dict[int, CompletionMeter] = {}
        self._generation = Generation(job.id, job.sampling, job.kv_retention, job.stream)
        if job.record is not None:
            job.record.generation = self._generation
        self.overrun = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if limits.request_timeout_s is not None:
            gone_s = 0.0 if job.record is None else job.record.duration_s
            self._timer = self._loop.call_later(
                limits.request_timeout_s - gone_s, self._expire, limits.request_timeout_s
            )
        now_s = time.monotonic()
        try:
            engine.submit(*map(self._request, range(len(job.prompts))))
        except BaseException:
            self.close()
            raise
        self._running = {choice: CompletionMeter(metrics, now_s) for choice in range(job.choices)}

    def _request(self, number: int) -> Request:
        return Request(
            request_id=self._request_id(number),
            prompt_token_ids=self._job.prompts[number],
            sampling=self._job.sampling,
            on_event=partial(self._post, number),
            kv_retention=self._job.kv_retention,
            cache_salt=self._job.cache_salt,
            grammar=self._job.grammar,
            marks=self._job.marks,
        )

    def _request_id(self, number: int) -> str:
        record = self._job.record
        name = self._job.id if record is None else record.request_id
        return f"{name}-{number}" if len(self._job.prompts) > 1 else name

    def _post(self, number: int, event: Event) -> None:
        """Runs on the engine's thread. Once the server's loop is closed nobody waits for the event
        any more.
        """
        choice = number * self._job.sampling.n + event.index
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._enter, choice, event)

    def _enter(self, choice: int, event: Event) -> None:
        """Runs on the server's loop. What the client does not read is kept for it only up to a
        bound.
        """
        if self._most_pending is not None and self._queue.qsize() >= self._most_pending:
            self.overrun.set()
            self.close()
        elif not self.overrun.is_set():
            self._queue.put_nowait((choice, event))

    def _expire(self, timeout_s: float) -> None:
        """The pages are free at the next step, also if the client is too slow to hear of it."""
        self._queue.put_nowait(make_timeout_error(timeout_s))
        self._abort_unfinished()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events until every completion has ended. Raises `ApiError` if the engine gave up on one,
        or the client did not take them.
        """
        while self._running or self.overrun.is_set():
            try:
                choice, event = await self._next()
            except ApiError as error:
                self._generation.failure = error.status
                raise
            self._measure(choice, event)
            yield choice, event

    async def _next(self) -> tuple[int, Event]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_CHECK_S):
                    news = await self._queue.get()
                    if self.overrun.is_set():  # nothing runs any more, what is left has no end
                        raise ApiError(408, "too many events wait for the client: read them faster")
                    if isinstance(news, ApiError):
                        raise news
                    if news[1].error_field is not None:
                        raise ApiError(
                            400,
                            news[1].error or "",
                            param=news[1].error_field,
                            code="invalid_value",
                        )
                    if news[1].finish_reason is FinishReason.ABORT:
                        raise ApiError(
                            500,
                            news[1].error or "the engine ended the request: it is shutting down",
                        )
                    return news
            if not self._engine.healthy:
                raise ApiError(503, "the engine has stopped: the server's log has the reason")

    def _measure(self, choice: int, event: Event) -> None:
        now_s = time.monotonic()
        self._generation.note(choice, event, now_s)
        self._running[choice].take(event, now_s)
        if event.finish_reason is not None:
            del self._running[choice]

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        self._abort_unfinished()
        for choice, meter in self._running.items():
            self._generation.reasons[choice] = FinishReason.ABORT
            meter.end(FinishReason.ABORT, time.monotonic())
        self._running.clear()

    def _abort_unfinished(self) -> None:
        for number in sorted({choice // self._job.sampling.n for choice in self._running}):
            self._engine.abort(self._request_id(number))
