"""From the engine's thread to asyncio: one `EventStream` per HTTP request, which never leaves pages behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tangram.engine.text import TokenText
from tangram.metrics import EngineStats
from tangram.serve.errors import ApiError
from tangram.serve.exposition import LatencyMeter, ServerMetrics
from tangram.types import Event, FinishReason, Request, SamplingParams

HEALTH_CHECK_S = 1.0


class Codec(Protocol):
    """Text to tokens and back, as the server needs it."""

    @property
    def longest_token_bytes(self) -> int:
        """No token is made of more bytes of text."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt."""

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation up to the answer; raises `RequestError` if the template rejects it."""

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name; raises `RequestError` (`field`) if one is not in the vocabulary."""

    def token_text(self, token_id: int) -> TokenText:
        """One token as `logprobs` reports it."""


class ServedEngine(Protocol):
    """The part of `tangram.engine.loop.Engine` that the server sees. `submit` and `abort` may come from any thread."""

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer, of one sequence."""

    @property
    def healthy(self) -> bool:
        """False once its thread has died."""

    def submit(self, request: Request) -> None:
        """Queue a request; raises `RequestError` at once if it can never be served."""

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
    """What one HTTP request asks of the engine: `sampling.n` completions of each prompt."""

    id: str
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    kv_retention: float | None
    cache_salt: str


class EventStream:
    """The events of one job, as (choice, event); choice = prompt number · n + index of the completion.

    Submits on construction (raises `RequestError` if the engine refuses, then nothing is left running).
    Whoever builds it must `close()` it: that aborts every completion that has not ended, which frees its pages.
    """

    def __init__(self, engine: ServedEngine, job: Job, metrics: ServerMetrics) -> None:
        self._engine, self._job = engine, job
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._running: dict[int, LatencyMeter] = {}
        n, now_s = job.sampling.n, time.monotonic()
        try:
            for number in range(len(job.prompts)):
                engine.submit(self._request(number))
                self._running |= {number * n + index: LatencyMeter(metrics, now_s) for index in range(n)}
        except BaseException:
            self.close()
            raise

    def _request(self, number: int) -> Request:
        return Request(
            request_id=self._request_id(number),
            prompt_token_ids=self._job.prompts[number],
            sampling=self._job.sampling,
            on_event=partial(self._post, number),
            kv_retention=self._job.kv_retention,
            cache_salt=self._job.cache_salt,
        )

    def _request_id(self, number: int) -> str:
        return f"{self._job.id}-{number}"

    def _post(self, number: int, event: Event) -> None:
        """Runs on the engine's thread. Once the server's loop is closed nobody waits for the event any more."""
        choice = number * self._job.sampling.n + event.index
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, event))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events until every completion has ended. Raises `ApiError` if the engine gave up on one."""
        while self._running:
            choice, event = await self._next()
            if event.finish_reason is FinishReason.ABORT:
                raise ApiError(500, event.error or "the engine ended the request: it is shutting down")
            self._measure(choice, event)
            yield choice, event

    async def _next(self) -> tuple[int, Event]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_CHECK_S):
                    return await self._queue.get()
            if not self._engine.healthy:
                raise ApiError(503, "the engine has stopped: the server's log has the reason")

    def _measure(self, choice: int, event: Event) -> None:
        meter, now_s = self._running[choice], time.monotonic()
        if event.token_ids:
            meter.tokens(len(event.token_ids), now_s)
        if event.finish_reason is not None:
            del self._running[choice]
            meter.end(event.finish_reason.value, now_s)

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        unfinished = sorted({choice // self._job.sampling.n for choice in self._running})
        for meter in self._running.values():
            meter.end(FinishReason.ABORT.value, time.monotonic())
        self._running.clear()
        for number in unfinished:
            self._engine.abort(self._request_id(number))
