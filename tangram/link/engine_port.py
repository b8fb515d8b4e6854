"""The engine's end: requests of API processes in, one message a step to each of them out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from socket import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tangram.errors import OverloadError, TangramError
from tangram.link.protocol import (
    Abort,
    Drain,
    PortAnswer,
    Queue,
    Ready,
    Refusal,
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
    make_encoder,
    read_frame,
)
from tangram.metrics import EngineStats
from tangram.serve.preparation import WorkThreads
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Event, Grammar, Request
from tangram.web.collector import ToldWatcher
from tangram.web.desk import WebDesk
from tangram.web.questions import Announcement, AnswerTimes

if TYPE_CHECKING:
    from tangram.engine.loop import Engine

# More than this waits for an API process that reads nothing: it hangs.
MOST_UNREAD_BYTES = 64 << 20
# A step takes seconds at most; the first may compile. After this time its device hangs.
MOST_STEP_S = 600
# An API process tells something every few seconds; if nothing comes for so long, it hangs.
MOST_SILENT_S = 600
Asked = TypeVar("Asked")
_log = logging.getLogger(__name__)


class EnginePort:
    """Serves `engine` and its `web` page to API processes. For one event loop, on another thread.

    Make it before the engine starts. A step that takes longer than `most_step_s` hangs, and so does
    an API process for which more than `most_unread_bytes` wait, or that answers requests and has
    told nothing for `most_silent_s`.
    """

    def __init__(
        self,
        engine: Engine,
        web: WebDesk | None = None,
        most_step_s: float = MOST_STEP_S,
        most_unread_bytes: int = MOST_UNREAD_BYTES,
        most_silent_s: float = MOST_SILENT_S,
    ) -> None:
        self.engine, self.web, self.most_unread_bytes = engine, web, most_unread_bytes
        self._most_step_s, self._most_silent_s = most_step_s, most_silent_s
        self._lines: set[_Line] = set()
        self._hangs = False
        self._drains_until_s: float | None = None
        self._watching: asyncio.Task[None] | None = None
        # One thread: grammars are compiled one after the other, as in the API process that asks.
        self.compiler = WorkThreads(1, "grammar")
        engine.follow(self._tell_all)

    async def serve(self, connection: socket) -> bool:
        """Serve the API process at the other end of `connection` until it hangs up.

        It is hung up on if it tells what cannot be understood. What it has asked for is then
        aborted. Returns whether it ever answered requests.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        line = _Line(self, writer)
        self._lines.add(line)
        try:
            line.tell_state(hangs=self._hangs)
            if self._drains_until_s is not None:
                line.send(Drain(max(0.0, self._drains_until_s - time.monotonic())))
            while (message := await read_frame(reader)) is not None:
                line.take(message)
        except Exception:  # the other lines go on
            _log.exception("an API process cannot be understood: its requests are ended")
        finally:
            self._lines.discard(line)
            line.close()
        return line.ready

    @property
    def answers(self) -> int:
        """How many requests of all API processes have not ended."""
        return sum(len(line.left) for line in self._lines)

    @property
    def ready(self) -> int:
        """How many API processes answer requests."""
        return sum(line.ready for line in self._lines)

    async def watch(self) -> None:
        """Watch until cancelled whether steps end while requests run, and tell all of it.

        Who hears nothing for long knows that this process stands still. An API process that tells
        nothing for as long is hung up on.
        """
        steps, since_s, least_s = None, 0.0, min(self._most_step_s, self._most_silent_s)
        while True:
            stats, now_s = self.engine.stats(), time.monotonic()
            if stats.steps != steps or stats.running == 0:
                steps, since_s = stats.steps, now_s
            hangs = now_s - since_s > self._most_step_s
            if hangs and not self._hangs:
                _log.error(
                    "a step of the engine has not ended for %.0f s: the server is not healthy",
                    now_s - since_s,
                )
            self._hangs = hangs
            for line in self._lines:
                line.tell_state(hangs=hangs)
                line.end_if_silent(self._most_silent_s)
            await asyncio.sleep(least_s / 60)
            if time.monotonic() - now_s > least_s / 2:  # this process stood still itself
                since_s = time.monotonic()
                for line in self._lines:
                    line.heard_s = since_s

    def start(self) -> None:
        """Start the engine and the web page, and watch until `close`."""
        if self.web is not None:
            self.web.start()
        self.engine.start()
        self._watching = asyncio.create_task(self.watch())

    def drain(self, grace_s: float) -> None:
        """Have the API processes take no new requests, and end in `grace_s` at the latest.

        Those that come later are told, too. Streams of the web page end.
        """
        self._drains_until_s = time.monotonic() + grace_s
        for line in self._lines:
            line.send(Drain(grace_s))
        if self.web is not None:
            self.web.drain()

    def close(self) -> None:
        """Compile no more, and tell nothing more. The engine goes on."""
        self.compiler.shutdown(wait=False, cancel_futures=True)
        if self.web is not None:
            self.web.close()
        if self._watching is not None:
            self._watching.cancel()

    def _tell_all(self) -> None:
        for line in list(self._lines):
            line.tell()


class _Line:
    """What is told to one API process, and what it has asked for."""

    def __init__(self, port: EnginePort, writer: asyncio.StreamWriter) -> None:
        self._engine, self._web, self._compiler = port.engine, port.web, port.compiler
        self._most_unread_bytes, self._writer = port.most_unread_bytes, writer
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._news_encoder, self._encoder = make_encoder(), make_encoder()  # one for each thread
        self._events: list[Event] = []  # of the engine's thread
        self._told: tuple[Queue, EngineStats, bool] | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.left: dict[str, int] = {}  # completions of each request that have not ended
        self.ready, self.heard_s = False, time.monotonic()
        self._answering: set[asyncio.Task[None]] = set()
        self._watchers: dict[int, ToldWatcher] = {}

    # -- on the engine's thread --------------------------------------------------------------------

    def take_event(self, event: Event) -> None:
        """Keep an event until the step has ended."""
        self._events.append(event)

    def tell(self) -> None:
        """Send what there is to tell."""
        state = self._read_queue(), self._engine.stats(), not self._engine.healthy
        if not self._events and state == self._told:
            return
        events, self._events = self._events, []
        queue, stats, ended = state
        new = None if self._told is not None and stats == self._told[1] else stats
        self._told = state
        message = frame(self._news_encoder.encode(StepNews(events, queue, new, ended)))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._pass_on, message, events)

    def _read_queue(self) -> Queue:
        full = None
        try:
            self._engine.check_queue(1)
        except OverloadError as error:
            full = Refusal.of(error)
        return Queue(self._engine.waiting, full)

    # -- on the loop -------------------------------------------------------------------------------

    def _pass_on(self, message: bytes, events: list[Event]) -> None:
        for event in events:
            if event.finish_reason is not None and (left := self.left.pop(event.request_id, 0)) > 1:
                self.left[event.request_id] = left - 1
        self._write(message)

    def tell_state(self, *, hangs: bool) -> None:
        """Tell of the engine's thread, which may not tell for long, or never again."""
        stats, ended = self._engine.stats(), not self._engine.healthy
        news = StepNews([], self._read_queue(), stats, ended, hangs)
        self._loop.call_soon(self.send, news)  # behind what the engine's thread has told before

    def end_if_silent(self, most_s: float) -> None:
        """Hang up on an API process that answers requests and has told nothing for `most_s`."""
        if self.ready and time.monotonic() - self.heard_s > most_s:
            _log.error("an API process has told nothing for %.0f s: its requests are ended", most_s)
            self._writer.transport.abort()

    def send(self, message: ToApi) -> None:
        """Send a message."""
        self._write(frame(self._encoder.encode(message)))

    def _write(self, message: bytes) -> None:
        if self._writer.transport.is_closing():
            return
        self._writer.write(message)
        if self._writer.transport.get_write_buffer_size() > self._most_unread_bytes:
            _log.error("an API process reads nothing: its requests are ended")
            self._writer.transport.abort()

    def take(self, message: bytes) -> None:
        """Do what the API process asks for."""
        self.heard_s = time.monotonic()
        match self._decoder.decode(message):
            case Submission() as asked:
                names = ", ".join(sent.request_id for sent in asked.requests)
                task = asyncio.create_task(self._answer(asked.number, names, self._submit, asked))
                for sent in asked.requests:
                    self._asking[sent.request_id] = task
                    forget = partial(self._forget, sent.request_id)
                    task.add_done_callback(forget)
            case Abort(request_id):
                self._abort(request_id)
            case Ready():
                self.ready = True
            case web_message if self._web is not None:
                try:
                    self._take_of_web(self._web, web_message)
                except Exception:  # answers go on without the page
                    _log.exception("the page could not do what was asked")

    def _forget(self, request_id: str, _: object) -> None:
        self._asking.pop(request_id, None)

    def _take_of_web(self, web: WebDesk, asked: ToEngine) -> None:
        match asked:
            case WebAsk(number, question):
                what = type(question).__name__
                task = asyncio.create_task(self._answer(number, what, web.answer, question))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case WebWatch(number, client):
                watcher = ToldWatcher(client, lambda frames: self.send(WebNews(number, frames)))
                try:
                    web.watch(watcher)
                except Exception as error:
                    self._reply(number, "watch", error)
                else:
                    self._watchers[number] = watcher
                    self._reply(number, "watch", b"")
            case WebUnwatch(number):
                if (left := self._watchers.pop(number, None)) is not None:
                    web.unwatch(left)
            case Announcement():
                web.announce(asked)
            case AnswerTimes():
                web.count(asked)

    async def _answer(
        self, number: int, what: str, find: Callable[[Asked], Awaitable[bytes]], asked: Asked
    ) -> None:
        answer: bytes | Exception
        try:
            answer = await find(asked)
        except Exception as error:
            answer = error
        self._reply(number, what, answer)

    def _reply(self, number: int, what: str, answer: bytes | Exception) -> None:
        """Tell the answer to question `number`, about `what`, or why there is none."""
        refusal = None
        if isinstance(answer, Exception):
            if not isinstance(answer, TangramError | ApiError):
                _log.error("the engine's process could not answer: %s", what, exc_info=answer)
            refusal, answer = Refusal.of(answer), b""
        if not self._engine.healthy:  # the API process hears of the end before the refusal
            self.tell_state(hangs=False)
        told = PortAnswer(number, answer, refusal, self._read_queue())
        self._loop.call_soon(self.send, told)

    async def _submit(self, asked: Submission) -> bytes:
        self._engine.submit(*[await self._prepare(sent) for sent in asked.requests])
        self.left |= {sent.request_id: sent.sampling.n for sent in asked.requests}
        return b""

    async def _prepare(self, sent: RequestMessage) -> Request:
        grammar: Grammar | None = None
        if sent.grammar is not None:
            grammar = self._engine.grammars.look_up(*sent.grammar)
            if grammar is None:
                grammar = await self._compiler.run(self._engine.grammars.compile, *sent.grammar)
        return sent.request(self.take_event, grammar)

    def _abort(self, request_id: str) -> None:
        if (task := self._asking.get(request_id)) is not None:
            task.cancel()
        self.left.pop(request_id, None)
        self._engine.abort(request_id)

    def close(self) -> None:
        """End what the API process has asked for."""
        for request_id in [*self._asking, *self.left]:
            self._abort(request_id)
        for task in self._answering:
            task.cancel()
        for watcher in self._watchers.values():
            if self._web is not None:
                self._web.unwatch(watcher)
        self._writer.close()
