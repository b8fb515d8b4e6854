"""From the engine to its clients: one `EventStream` for each HTTP request.

However a stream ends, its pages are freed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    SamplingValues,
    ThinkingFormat,
    ToolFormat,
)

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


class KnownEngine(Protocol):
    """What is known of an engine, wherever it computes. Nothing here waits for a step."""

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
        """How many completions wait for a place in the batch."""

    @property
    def healthy(self) -> bool:
        """False once it has ended, or while a step of it does not end."""

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if `submit` would for `coming` completions."""

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; an unknown or finished one is ignored."""

    def stats(self) -> EngineStats:
        """The engine's statistics between two steps, as it has told last."""


class ServedEngine(KnownEngine, Protocol):
    """An engine as the server sees it, from one event loop. It computes elsewhere.

    Events come on that loop. If it stops, by itself or by `stop`, every completion ends with an
    event.
    """

    @property
    def ended(self) -> bool:
        """Whether it has stopped by itself, for good."""

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
        self._tell: Callable[[], object] = self._do_nothing
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
            stream._timer = stream._loop.call_at(ends_s, stream._expire)
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

    def _expire(self) -> None:
        """End the request. Its pages are free at the next step, however slow the client is."""
        self._pending.append(make_timeout_error(self._most_s))
        self._abort_unfinished()
        self._tell()

    def follow(self, tell: Callable[[], object]) -> None:
        """Call `tell` whenever there is more to take."""
        self._tell = tell

    @staticmethod
    def _do_nothing() -> None:
        """Nobody follows yet."""

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
