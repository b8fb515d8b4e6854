"""The engine as an API process sees it: what `ServedEngine` says, over a pair of sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from socket import socket
from typing import TYPE_CHECKING

import msgspec

from tangram.errors import EngineError
from tangram.link.protocol import (
    Abort,
    Drain,
    PortAnswer,
    Queue,
    Ready,
    RequestMessage,
    StepNews,
    Submission,
    ToApi,
    ToEngine,
    WebAsk,
    WebNews,
    WebUnwatch,
    WebWatch,
    frame,
    read_frame,
)
from tangram.metrics import EngineStats
from tangram.types import Event, FinishReason, Request, SamplingValues, Usage
from tangram.web.questions import Announcement, AnswerTimes, Question
from tangram.web.watchers import Watcher

if TYPE_CHECKING:
    from tangram.engine.loop import Engine
    from tangram.engine.text.codec import TextCodec
    from tangram.engine.text.grammar import GrammarCompiler

# The engine's process tells something every few seconds; if nothing comes for so long, it hangs.
MOST_SILENT_S = 600
_GONE = "the engine has stopped: the server's log has the reason"
_ENDING = "the server is shutting down: send the request to another, or again in a while"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineNature:
    """What an API process must know of the engine before it asks anything.

    Codec and grammars travel as what they are made of, and are made again where they arrive.
    """

    codec: TextCodec
    grammars: GrammarCompiler
    max_model_len: int
    sampling: SamplingValues
    vocab_size: int
    most_completions: int | None
    stats: EngineStats

    @classmethod
    def of(cls, engine: Engine) -> EngineNature:
        """Those of `engine`."""
        facts = {entry.name: getattr(engine, entry.name) for entry in fields(cls)}
        return cls(**facts | {"stats": engine.stats()})


class RunningRequest:
    """A request, and the completions of it that have not ended, with what they have used."""

    def __init__(self, request: Request) -> None:
        self.request, nothing = request, Usage(len(request.prompt_token_ids), 0, 0, 0, 0)
        self.left = dict.fromkeys(range(request.sampling.n), nothing)

    def take(self, event: Event) -> None:
        """Pass an event on."""
        if event.finish_reason is None:
            self.left[event.index] = event.usage
        else:
            del self.left[event.index]
        try:
            self.request.on_event(event)
        except Exception:  # the other requests go on
            _log.exception("request %s could not take its tokens", self.request.request_id)

    def end(self, error: str | None, *, may_retry: bool) -> None:
        """End all that have not ended."""
        name, reason = self.request.request_id, FinishReason.ABORT
        for index, usage in list(self.left.items()):
            event = Event(name, index, (), (), usage, reason, error, may_retry=may_retry)
            self.take(event)


class RemoteEngine:
    """The engine that `connect` reaches at the start, known by `facts`. For one event loop.

    `on_drain` is called with the seconds that are left when the server is to end. If nothing is
    heard for `most_silent_s`, the engine is not healthy.
    """

    def __init__(
        self,
        facts: EngineNature,
        connect: Callable[[], socket],
        on_drain: Callable[[float], None],
        most_silent_s: float = MOST_SILENT_S,
    ) -> None:
        self.codec, self.grammars = facts.codec, facts.grammars
        self.max_model_len, self.sampling = facts.max_model_len, facts.sampling
        self.ended = self._hangs = self._silent = self._is_ready = False
        self._most_silent_s, self._heard_s = most_silent_s, time.monotonic()
        self._vocab_size, self._most_completions = facts.vocab_size, facts.most_completions
        self._stats, self._queue = facts.stats, Queue()
        self._connect, self._on_drain = connect, on_drain
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._watchers: dict[int, Watcher] = {}
        self._running: dict[str, RunningRequest] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to take what the engine tells."""
        reader, self._writer = await asyncio.open_connection(sock=self._connect())
        self._heard_s = time.monotonic()
        self._listening = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._watch_silence()),
        ]

    def tell_ready(self) -> None:
        """Tell the engine's process that requests are answered, now and every few seconds."""
        self._tell(Ready())
        self._is_ready = True

    async def stop(self) -> None:
        """End what runs, and hang up. Safe to call twice."""
        for request_id, running in list(self._running.items()):
            self.abort(request_id)
            running.end(None, may_retry=False)
        self._refuse_asked(_ENDING)
        for task in self._listening:
            task.cancel()
        if self._writer is not None:
            self._writer.close()

    @property
    def healthy(self) -> bool:
        """See `ServedEngine`."""
        return not (self.ended or self._hangs or self._silent)

    @property
    def waiting(self) -> int:
        """How many completions wait for a place in the batch, as the engine has last told."""
        return self._queue.waiting

    def stats(self) -> EngineStats:
        """The newest that the engine has told."""
        return self._stats

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if the queue was full when the engine has last told of it.

        Not for `coming` completions that may never enter it: `submit` says so.
        """
        may_enter = self._most_completions is None or coming <= self._most_completions
        if self._queue.full is not None and may_enter:
            raise self._queue.full.error

    # -- as the source of the web page -------------------------------------------------------------

    async def ask(self, question: Question) -> bytes:
        """See `WebSource`."""
        return await self._call(WebAsk(next(self._numbers), question))

    async def watch(self, watcher: Watcher) -> None:
        """See `WebSource`."""
        number = next(self._numbers)
        self._watchers[number] = watcher
        try:
            await self._call(WebWatch(number, watcher.client))
        except BaseException:
            self.unwatch(watcher)
            raise

    def unwatch(self, watcher: Watcher) -> None:
        """See `WebSource`."""
        for number in [number for number, other in self._watchers.items() if other is watcher]:
            del self._watchers[number]
            self._tell(WebUnwatch(number))

    def announce(self, announcement: Announcement) -> None:
        """See `WebSource`."""
        self._tell(announcement)

    def count(self, times: AnswerTimes) -> None:
        """See `WebSource`."""
        self._tell(times)

    # -- as the engine of a server -----------------------------------------------------------------

    async def submit(self, *requests: Request) -> None:
        """See `ServedEngine`."""
        for request in requests:  # here: one that is far too long is not sent
            request.check_length(self.max_model_len)
        sent = [RequestMessage.of(request, self._vocab_size) for request in requests]
        self._running |= {request.request_id: RunningRequest(request) for request in requests}
        try:
            await self._call(Submission(next(self._numbers), sent))
        except Exception:
            for request in requests:
                self._running.pop(request.request_id, None)
            raise
        except asyncio.CancelledError:
            for request in requests:
                self.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; one that has ended, or was never submitted, is ignored."""
        if self._running.pop(request_id, None) is not None:
            self._tell(Abort(request_id))

    async def _call(self, message: Submission | WebAsk | WebWatch) -> bytes:
        """The answer to `message`. Raises why there is none."""
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[message.number] = answered
        try:
            self._send(message)
            return await answered
        finally:
            del self._asked[message.number]

    def _send(self, message: ToEngine) -> None:
        """Send what is answered. Raises `EngineError` if nobody is there to answer."""
        if self._writer is None or self._writer.is_closing():
            raise EngineError(_GONE if self.ended else _ENDING)
        self._writer.write(frame(msgspec.msgpack.encode(message)))

    def _tell(self, message: ToEngine) -> None:
        """Send what is not answered, if anybody is there."""
        with suppress(EngineError):
            self._send(message)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(ToApi)
        try:
            while (message := await read_frame(reader)) is not None:
                self._heard_s, self._silent = time.monotonic(), False
                self._take(decoder.decode(message))
        except Exception:  # this process ends, and another one takes its place
            _log.exception("the engine's process cannot be understood")
        self._fail()

    async def _watch_silence(self) -> None:
        """See whether the engine's process tells nothing, and let it see that this one lives."""
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(self._most_silent_s / 60)
            if (
                time.monotonic() - begin_s > self._most_silent_s / 2
            ):  # this process stood still itself
                self._heard_s = time.monotonic()
            if self._is_ready:
                self._tell(Ready())
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._most_silent_s and not self._silent:
                self._silent = True
                _log.error(
                    "the engine's process has told nothing for %.0f s: the server is not healthy",
                    silent_s,
                )

    def _fail(self) -> None:
        """The engine has stopped."""
        self.ended = True
        if self._writer is not None:
            self._writer.close()
        self._refuse_asked(_GONE)
        for watcher in self._watchers.values():
            watcher.send(b"")
        running, self._running = self._running, {}
        for request in running.values():
            request.end(_GONE, may_retry=True)

    def _refuse_asked(self, error: str) -> None:
        """End what waits for an answer of the engine's process."""
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(EngineError(error))

    def _take(self, told: ToApi) -> None:
        match told:
            case StepNews(events, queue, stats, ended, hangs):
                self._queue, self._hangs = queue, hangs
                self._stats = self._stats if stats is None else stats
                for event in events:
                    self._pass_on(event)
                if ended:
                    self._fail()
            case PortAnswer(number, body, refusal, queue):
                self._queue = queue
                answered = self._asked.get(number)
                if answered is None or answered.done():  # its caller was cancelled
                    return
                if refusal is None:
                    answered.set_result(body)
                else:
                    answered.set_exception(refusal.error)
            case Drain(grace_s):
                self._on_drain(grace_s)
            case WebNews(number, frames):
                if (watcher := self._watchers.get(number)) is not None:
                    watcher.send(frames)

    def _pass_on(self, event: Event) -> None:
        running = self._running.get(event.request_id)
        if running is None:  # it was aborted
            return
        running.take(event)
        if not running.left:
            self._running.pop(event.request_id, None)
