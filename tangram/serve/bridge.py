"""From the engine's thread to asyncio: one `EventStream` for each HTTP request.

However a stream ends, its pages are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tangram.engine.answer_text import AnswerText
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
    SamplingValues,
    ThinkingFormat,
    ToolFormat,
)

HEALTH_CHECK_S = 1.0
# More completions than these are seldom in one step, so the bound on pending events stops growing.
_COUNTED_CHOICES = 8


@dataclass(frozen=True)
class Limits:
    """How long an answer may take, and how far a client may fall behind its stream.

    A request ends `request_timeout_s` after it arrived, time in the queue included; None is no
    limit. A stream ends when `pending_events` for each of its completions (at most eight count)
    wait for the client. `max_queue` is the engine's; requests in preparation count too, and None is
    no limit. Raises `ConfigError` for a number out of range.
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
    """Text to tokens and back."""

    @property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token has."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if it knows none or its form is unknown."""

    @property
    def thinking_format(self) -> ThinkingFormat | None:
        """How the model marks its thoughts; None if it has none or its form is unknown."""

    @property
    def marks(self) -> Marks:
        """The control tokens that mark calls and thoughts."""

    @property
    def control_token_ids(self) -> Sequence[int]:
        """The tokens that are neither text nor an end token."""

    @property
    def template_options(self) -> frozenset[str]:
        """The variables of the model's chat template that a request may set."""

    def warm(self) -> None:
        """Do in advance what the first conversation would wait for."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """The text of a conversation up to the answer, in parts.

        Raises `RequestError` if the template fails, `MachineError` if nothing could render it.
        """

    def encode_chat(self, parts: Iterable[str]) -> tuple[int, ...]:
        """The tokens of what `render_chat` returns."""

    def close(self) -> None:
        """End what renders conversations."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """The tokens that are no text."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name; raises `RequestError` (`field`) for an unknown
        one.
        """

    def token_text(self, token_id: int) -> TokenText:
        """One token as `logprobs` reports it."""


class Grammars(Protocol):
    """The part of `tangram.engine.grammar.GrammarCompiler` that the server sees."""

    @property
    def most_trial_s(self) -> int:
        """The seconds of a processor that a new grammar may be tried."""

    def warm(self) -> None:
        """Do in advance what the first grammar would wait for."""

    def look_up(self, source: str, field: str) -> Grammar | None:
        """What `compile` returned or raised for the same source before; None if it is new."""

    def compile(self, source: str, field: str) -> Grammar:
        """The compiled form of a grammar in llguidance's Lark dialect. Call it from any thread.

        Raises `RequestError` (`field`) if it is no grammar, `MachineError` if it could not be
        tried.
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
    def sampling(self) -> SamplingValues:
        """What holds where a request states nothing."""

    @property
    def waiting(self) -> int:
        """How many completions wait for a place in the batch; asking takes no time."""

    @property
    def healthy(self) -> bool:
        """False once its thread has died."""

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none.

        Raises `RequestError` if they can never be served, `OverloadError` if too many wait.
        """

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if `submit` would for `coming` completions; waits for nothing."""

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; an unknown or finished one is ignored."""

    def start(self) -> None:
        """Start the thread that serves."""

    def stop(self) -> None:
        """End that thread and abort what runs. Safe to call twice."""

    def stats(self) -> EngineStats:
        """The engine's statistics between two steps."""


@dataclass(frozen=True)
class Job:
    """One HTTP request for the engine: `sampling.n` completions of each prompt.

    `record` belongs to a request that came by HTTP. It collects the results, and its id is the
    request's name in the engine's log.
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
    kv_scorer: str | None = None
    speculative: bool | None = None

    @property
    def choices(self) -> int:
        """How many completions there are."""
        return len(self.prompts) * self.sampling.n

    def read_answer(self, codec: Codec, choice: int) -> AnswerText:
        """What reads the text of completion `choice` from its events."""
        prompt = self.prompts[choice // self.sampling.n]
        return AnswerText(codec, self.sampling, prompt, self.marks)

    def engine_id(self, number: int) -> str:
        """The id of the engine's request for prompt `number`."""
        name = self.id if self.record is None else self.record.request_id
        return f"{name}-{number}" if len(self.prompts) > 1 else name


def make_timeout_error(limit_s: float | None) -> ApiError:
    """The error of a request that took longer than `limit_s`."""
    return ApiError(504, f"the request took longer than {limit_s} s, the most that it may here")


class EventStream:
    """The events of one job, as (choice, event).

    A choice is the number of the prompt · n + the index of the completion. The job is submitted on
    construction, which raises `RequestError` or `OverloadError` if the engine refuses it. Always
    `close()` it: that aborts every completion that has not ended, and frees its pages. `overrun` is
    set if it was closed because the client does not read.
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
        self.generation = Generation(
            job.id, job.sampling, job.kv_retention, job.stream, job.kv_scorer
        )
        if job.record is not None:
            job.record.generation = self.generation
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
            request_id=self._job.engine_id(number),
            prompt_token_ids=self._job.prompts[number],
            sampling=self._job.sampling,
            on_event=partial(self._post, number),
            kv_retention=self._job.kv_retention,
            kv_scorer=self._job.kv_scorer,
            speculative=self._job.speculative,
            cache_salt=self._job.cache_salt,
            grammar=self._job.grammar,
            marks=self._job.marks,
        )

    def _post(self, number: int, event: Event) -> None:
        """Pass an event on from the engine's thread, unless the server's loop is closed."""
        choice = number * self._job.sampling.n + event.index
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._enter, choice, event)

    def _enter(self, choice: int, event: Event) -> None:
        """Enter an event, on the server's loop. The number of pending events is bounded."""
        if self._most_pending is not None and self._queue.qsize() >= self._most_pending:
            self.overrun.set()
            self.close()
        elif not self.overrun.is_set():
            self._queue.put_nowait((choice, event))

    def _expire(self, timeout_s: float) -> None:
        """End the request. Its pages are free at the next step, however slow the client is."""
        self._queue.put_nowait(make_timeout_error(timeout_s))
        self._abort_unfinished()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events until every completion has ended.

        Raises `ApiError` if the engine gave up, or if the client did not read.
        """
        while self._running or self.overrun.is_set():
            try:
                choice, event = await self._next()
            except ApiError as error:
                self.generation.failure = error.status
                raise
            self._measure(choice, event)
            yield choice, event

    async def _next(self) -> tuple[int, Event]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_CHECK_S):
                    news = await self._queue.get()
                    if self.overrun.is_set():  # all is aborted, so the events left have no end
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
                            503 if news[1].may_retry else 500,
                            news[1].error or "the engine ended the request: it is shutting down",
                        )
                    return news
            if not self._engine.healthy:
                raise ApiError(503, "the engine has stopped: the server's log has the reason")

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
        for number in sorted({choice // self._job.sampling.n for choice in self._running}):
            self._engine.abort(self._job.engine_id(number))
