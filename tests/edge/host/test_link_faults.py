"""Who joins a link late, tells what nobody understands, or asks while the other end stops."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tangram.errors import EngineError
from tangram.link.engine_port import EnginePort
from tangram.link.linked_engine import LinkedEngine
from tangram.link.protocol import Ready, frame
from tangram.link.remote_engine import EngineNature, RemoteEngine
from tangram.link.supervisor import Supervisor
from tangram.serve.answers.bridge import EventStream, Limits
from tangram.serve.observability.exposition import ServerMetrics
from tangram.serve.observability.record import Generation
from tangram.serve.options import ServerOptions
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Event, FinishReason, Request, SamplingParams
from tangram.web.desk import WebDesk
from tangram.web.questions import Announcement, HistoryQuestion, Question
from tests.edge.wire.fake_engine import FakeEngine, FakeGrammar, FakeGrammars
from tests.edge.wire.watched_engine import ObservedFakeEngine
from tests.mentions import mentioning, mentions

from .test_link import HeardEvents, link_engine, request, until


def ignore(grace_s: float) -> None:
    """It ends at the end of the test anyway."""


@asynccontextmanager
async def join(
    port: EnginePort,
    engine: FakeEngine,
    on_drain: Callable[[float], None] = ignore,
    **options: float,
) -> AsyncIterator[RemoteEngine]:
    """An API process that joins `port` now, and hangs up at the end."""
    here, there = socket.socketpair()
    serving = asyncio.create_task(port.serve(there))
    remote = RemoteEngine(EngineNature.of(engine), lambda: here, on_drain, **options)
    await remote.start()
    try:
        yield remote
    finally:
        await remote.stop()
        await asyncio.wait_for(serving, 10)


def test_who_comes_while_the_server_ends_is_told_the_seconds_that_are_left() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), list[float]()
        port = EnginePort(engine)
        port.drain(2.0)
        await asyncio.sleep(0.2)
        async with join(port, engine, told.append):
            await until(lambda: told != [])
        assert 1.0 < told[0] < 1.9

    asyncio.run(run())


class StuckEngine(FakeEngine):
    """Its first step does not end before it is `freed`."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        super().__init__()

    def _loop(self) -> None:
        self.freed.wait()
        super()._loop()


def test_who_comes_while_a_step_hangs_is_not_healthy_until_it_ends() -> None:
    async def run() -> None:
        engine, told = StuckEngine(), HeardEvents([])
        port = EnginePort(engine, most_step_s=0.2)
        watching = asyncio.create_task(port.watch())
        engine.start()
        async with join(port, engine) as first:
            await first.submit(request("a", "silent", told))
            await until(lambda: not first.healthy)
            watching.cancel()  # it would tell the second one, too, but only some seconds later
            async with join(port, engine) as second:
                await until(lambda: not second.healthy)
                await asyncio.sleep(0.1)  # nothing that it is told later says otherwise
                assert not second.healthy
                engine.freed.set()
                await until(lambda: second.healthy)
        engine.stop()

    asyncio.run(run())


def test_an_engine_of_which_nothing_is_heard_is_not_healthy_until_it_tells_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when its interpreter stands still, which then watches no step either."""

    async def run() -> None:
        engine = FakeEngine()
        port = EnginePort(engine, most_step_s=6)
        async with join(port, engine, most_silent_s=0.6) as remote:
            assert remote.healthy
            await until(lambda: not remote.healthy)
            watching = asyncio.create_task(port.watch())  # it tells ten times a second
            await until(lambda: remote.healthy)
            await asyncio.sleep(0.8)
            assert remote.healthy
            watching.cancel()

    asyncio.run(run())
    assert caplog.text.count("has told nothing") == 1


def test_who_comes_after_the_engine_has_ended_hears_of_it() -> None:
    async def run() -> None:
        engine = FakeEngine()
        port = EnginePort(engine)
        engine.die()
        async with join(port, engine) as late:
            await until(lambda: late.ended)
            late.tell_ready()  # its server has started meanwhile

    asyncio.run(run())


def test_what_an_api_process_tells_and_nobody_understands_ends_its_line_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        engine, kept = FakeEngine(), HeardEvents([])
        port = EnginePort(engine)
        engine.start()
        here, there = socket.socketpair()
        async with join(port, engine) as other:
            await other.submit(request("kept", "endless", kept))
            serving = asyncio.create_task(port.serve(there))
            here.sendall(frame(b"\xc1"))
            assert await asyncio.wait_for(serving, 10) is False
            seen = len(kept.events)
            await until(lambda: len(kept.events) > seen + 3)
        here.settimeout(10)
        while here.recv(1 << 16):  # to its end: it has been hung up on
            pass
        here.close()
        engine.stop()

    asyncio.run(run())
    assert "API process" in caplog.text


def test_what_the_engine_tells_and_an_api_process_does_not_understand_ends_what_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        here, there = socket.socketpair()
        remote = RemoteEngine(EngineNature.of(engine), lambda: here, lambda grace_s: None)
        await remote.start()
        asked = asyncio.create_task(remote.submit(request("a", "abc", told)))
        await asyncio.sleep(0)
        there.sendall(frame(b"\xc1"))
        with pytest.raises(EngineError):
            await asyncio.wait_for(asked, 10)
        assert remote.ended and told.ended
        await remote.stop()
        there.close()

    asyncio.run(run())
    assert "engine's process" in caplog.text


@dataclass
class SlowGrammars(FakeGrammars):
    """Those of the engine's end: each waits until it is `open`."""

    begun: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)

    def compile(self, source: str, name: str) -> Any:
        self.begun.set()
        assert self.open.wait(20)
        return super().compile(source, name)


@asynccontextmanager
async def link_slow() -> AsyncIterator[tuple[FakeEngine, SlowGrammars, LinkedEngine]]:
    grammars = SlowGrammars()
    engine = FakeEngine(grammars=grammars)
    async with link_engine(engine) as served:
        try:
            yield engine, grammars, served
        finally:
            grammars.open.set()


def test_the_clock_of_a_request_runs_while_it_is_submitted() -> None:
    async def run() -> None:
        async with link_slow() as (engine, grammars, served):
            grammar = FakeGrammar("slow", "response_format")
            asked = Request("a", (97,), SamplingParams(), grammar=grammar)
            generation = Generation("a", [asked], stream=False)
            limits, metrics = Limits(request_timeout_s=0.3), ServerMetrics(served.stats)
            begin_s = time.monotonic()
            with pytest.raises(ApiError) as caught:
                async with asyncio.timeout(10):
                    await EventStream.open(served, generation, metrics, limits)
            assert caught.value.status == 504 and "0.3 s" in str(caught.value)
            assert 0.2 < time.monotonic() - begin_s < 3
            await until(lambda: engine.aborted == ["a"])
            grammars.open.set()
            other = replace(generation, requests=[replace(asked, request_id="other")])
            (await EventStream.open(served, other, metrics, Limits())).close()
            assert [one.request_id for one in engine.submitted] == ["other"]

    asyncio.run(run())


def test_who_is_submitted_while_the_api_process_ends_hears_of_it() -> None:
    async def run() -> None:
        async with link_slow() as (engine, grammars, served):
            told = HeardEvents([])
            wanted = replace(request("a", "abc", told), grammar=FakeGrammar("slow", "grammar"))
            asked = asyncio.create_task(served.submit(wanted))
            await until(grammars.begun.is_set)
            # The engine of this process stops with it, which the API process of a server outlives.
            await RemoteEngine.stop(served)
            with pytest.raises(EngineError, match="shutting down"):
                await asyncio.wait_for(asked, 10)
            await until(lambda: engine.aborted == ["a"])
            assert told.events[-1].finish_reason is FinishReason.ABORT
            with pytest.raises(EngineError, match="shutting down"):
                await asyncio.wait_for(served.ask(HistoryQuestion(60)), 10)
            served.abort("a")  # who has gone is not told

    asyncio.run(run())


def test_an_api_process_that_goes_while_it_submits_leaves_nothing_behind() -> None:
    async def run() -> None:
        grammars, told = SlowGrammars(), HeardEvents([])
        engine = FakeEngine(grammars=grammars)
        port = EnginePort(engine)
        engine.start()
        async with join(port, engine) as other:
            here, there = socket.socketpair()
            serving = asyncio.create_task(port.serve(there))
            going = RemoteEngine(EngineNature.of(engine), lambda: here, lambda grace_s: None)
            await going.start()
            wanted = replace(request("a", "abc", told), grammar=FakeGrammar("slow", "grammar"))
            asked = asyncio.create_task(going.submit(wanted))
            await until(grammars.begun.is_set)
            here.shutdown(socket.SHUT_RDWR)  # as if it was killed
            await serving
            with pytest.raises(EngineError):
                await asked
            grammars.open.set()
            kept = HeardEvents([])
            await other.submit(
                replace(request("b", "abc", kept), grammar=FakeGrammar("next", "grammar"))
            )
            await until(lambda: kept.ended)
            assert [one.request_id for one in engine.submitted] == ["b"]
            await going.stop()
        engine.stop()

    asyncio.run(run())


class BrokenDesk(WebDesk):
    async def answer(self, question: Question) -> bytes:
        raise ZeroDivisionError("secret path")


def test_a_bug_in_an_answer_of_the_page_is_an_error_and_nobody_waits() -> None:
    async def run() -> None:
        engine = ObservedFakeEngine()
        served = LinkedEngine(engine, BrokenDesk(engine, "fake"))
        await served.start()
        try:
            with pytest.raises(RuntimeError, match="its log has the reason") as caught:
                await asyncio.wait_for(served.ask(HistoryQuestion(60)), 10)
            assert "secret" not in str(caught.value)
        finally:
            await served.stop()

    asyncio.run(run())


class EndingProcess:
    """An API process that ends at once."""

    def begin(self, start: object) -> socket.socket:
        here, there = socket.socketpair()
        there.close()
        return here

    def wait(self, most_s: float) -> str:
        return "has ended with code 1"


class FullMachine:
    """API processes of which the second cannot be started."""

    def __init__(self) -> None:
        self.started = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> EndingProcess:
        return EndingProcess()

    def start_again(self, place: int) -> None:
        self.started += 1
        if self.started == 1:
            raise OSError("no memory")

    def kill(self) -> None:
        """None lives."""


def test_a_machine_that_starts_no_process_now_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, processes, start = (
        FakeEngine(),
        FullMachine(),
        SimpleNamespace(options=ServerOptions(shutdown_grace_s=1.0)),
    )
    given: Any = (EnginePort(engine), start, processes, lambda: None)
    with pytest.raises(EngineError, match=mentioning("3")):
        asyncio.run(Supervisor(*given).run())
    assert processes.started == 2 and mentions(caplog.text, "memory")


def test_an_api_process_of_which_nothing_is_heard_is_hung_up_on_and_the_others_are_not() -> None:
    """As when its event loop stands still: it is then killed and replaced."""

    async def run() -> None:
        engine = FakeEngine()
        port = EnginePort(engine, most_silent_s=0.6)
        watching = asyncio.create_task(port.watch())
        here, there = socket.socketpair()
        silent = asyncio.create_task(port.serve(there))
        _, writer = await asyncio.open_connection(sock=here)
        writer.write(frame(msgspec.msgpack.encode(Ready())))
        async with join(port, engine, most_silent_s=0.6) as other:
            other.tell_ready()
            await asyncio.wait_for(silent, 20)
            assert port.ready == 1
            await asyncio.sleep(1)
            assert port.ready == 1, "who tells that it lives is left alone"
        writer.close()
        watching.cancel()

    asyncio.run(run())


def test_a_request_that_cannot_take_its_tokens_ends_no_other() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])

        def fail(event: Event) -> None:
            raise RuntimeError("this request takes nothing")

        async with link_engine(engine) as served:
            await served.submit(replace(request("deaf", "abc", told), on_event=fail))
            await served.submit(request("other", "abc", told))
            await until(lambda: told.ended)
            assert not served.ended

    asyncio.run(run())


def test_a_fault_of_the_page_ends_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class FaultyDesk:
        def start(self) -> None:
            """Nothing."""

        def announce(self, announcement: object) -> None:
            raise RuntimeError("the page is at fault")

    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        port = EnginePort(engine, FaultyDesk())  # type: ignore[arg-type]
        engine.start()
        async with join(port, engine) as remote:
            remote.announce(Announcement("a", "b", "c", 0, None, 0.0))
            await remote.submit(request("a", "abc", told))
            await until(lambda: told.ended)
        engine.stop()

    asyncio.run(run())
    assert "the page could not do what was asked" in caplog.text
