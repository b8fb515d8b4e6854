"""What API processes and the engine's process tell each other, and what each does when the other
has gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import EngineError, MachineError, OverloadError, RequestError, TangramError
from tangram.link.engine_port import EnginePort
from tangram.link.linked_engine import LinkedEngine
from tangram.link.protocol import PortAnswer, Queue, Refusal, RequestMessage, StepNews, ToApi
from tangram.link.remote_engine import EngineNature, RemoteEngine
from tangram.serve.transport.api_errors import ApiError
from tangram.types import (
    DraftedTokens,
    Event,
    FinishReason,
    Marks,
    Request,
    RequestOptions,
    SamplingParams,
    TokenLogprob,
    Usage,
    ignore_event,
)
from tests.edge.wire.fake_engine import FakeEngine
from tests.mentions import mentioning

counts = st.integers(0, 2**40)
usages = st.builds(
    Usage, *[counts] * 5, drafted=st.none() | st.builds(DraftedTokens, counts, counts)
)
logprobs = st.builds(
    TokenLogprob,
    counts,
    st.floats(allow_nan=False),
    st.lists(st.tuples(counts, st.floats(allow_nan=False)), max_size=3).map(tuple),
)
events = st.builds(
    Event,
    st.text(),
    counts,
    st.lists(counts, max_size=4).map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    usages,
    st.none() | st.sampled_from(FinishReason),
    error=st.none() | st.text(),
    admitted_s=st.none() | st.floats(allow_nan=False),
    error_field=st.none() | st.text(),
    may_retry=st.booleans(),
)


@given(st.lists(events, max_size=5))
def test_events_arrive_as_they_were_sent(sent: list[Event]) -> None:
    told = StepNews(sent, Queue(3, Refusal("overload", "full", "", 7, "queue_full")), None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ToApi) == told


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple),
    temperature=st.none() | st.floats(0, 2),
    stop=st.lists(st.text(min_size=1), max_size=3),
    bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    names=st.dictionaries(st.integers(0, 1000), st.text(), max_size=3),
)
def test_requests_arrive_as_they_were_sent(
    prompt: tuple[int, ...],
    temperature: float | None,
    stop: list[str],
    bias: dict[int, float],
    names: dict[int, str],
) -> None:
    sampling = SamplingParams(temperature=temperature, stop=stop, logit_bias=bias)
    marks = Marks(names, frozenset(names))
    options = {"kv_retention": 0.5, "cache_salt": "salt", "kv_scorer": "a", "speculative": False}
    assert options.keys() == {entry.name for entry in fields(RequestOptions)}
    sent = Request("a", prompt, sampling, ignore_event, marks=marks, **options)
    message = msgspec.msgpack.encode(RequestMessage.of(sent, 1000))
    arrived = msgspec.msgpack.decode(message, type=RequestMessage).request(ignore_event, None)
    assert arrived == sent


@pytest.mark.parametrize(
    "error",
    [
        RequestError(lambda field: f"{field} is wrong", "prompt"),
        RequestError("wrong", "prompt"),
        OverloadError("full", 7, "grammar_queue_full"),
        MachineError("no memory"),
        EngineError("stopped"),
        ApiError(404, "no such request", param="id", code="no_such_request"),
        ApiError(403, "not for you"),
    ],
)
def test_refusals_are_raised_as_what_they_were(error: TangramError | ApiError) -> None:
    message = msgspec.msgpack.encode(PortAnswer(1, b"", Refusal.of(error), Queue()))
    refusal = msgspec.msgpack.decode(message, type=PortAnswer).refusal
    assert refusal is not None
    found = refusal.error
    assert (type(found), str(found)) == (type(error), str(error))
    if isinstance(error, RequestError) and isinstance(found, RequestError):
        assert str(found.rename("input")) == str(error.rename("input"))
    if isinstance(error, OverloadError) and isinstance(found, OverloadError):
        assert (found.retry_after_s, found.code) == (error.retry_after_s, error.code)
    if isinstance(error, ApiError) and isinstance(found, ApiError):
        assert (found.status, found.body()) == (error.status, error.body())


@dataclass
class HeardEvents:
    """The events of a request."""

    events: list[Event]

    def take(self, event: Event) -> None:
        self.events.append(event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].finish_reason is not None


def request(name: str, text: str, told: HeardEvents, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": None} | sampling)
    return Request(name, tuple(map(ord, text)), params, told.take)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def link_engine(engine: FakeEngine) -> AsyncIterator[LinkedEngine]:
    served = LinkedEngine(engine)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


def test_events_of_a_request_come_in_order_and_end() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        async with link_engine(engine) as served:
            await served.submit(request("a", "abc", told))
            await until(lambda: told.ended)
            assert "".join(chr(t) for event in told.events for t in event.token_ids) == "cba"
            served.abort("a")  # it has ended: nothing to abort
            assert engine.aborted == []

    asyncio.run(run())


def test_what_is_refused_is_raised_and_nothing_runs() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        async with link_engine(engine) as served:
            with pytest.raises(RequestError, match=mentioning("kv_retention 7.0 (0, 1]")):
                await served.submit(replace(request("a", "abc", told), kv_retention=7.0))
            with pytest.raises(RequestError, match=mentioning("prompt 600 511")):
                await served.submit(request("a", "x" * 600, told))
            assert not engine.submitted and not told.events

    asyncio.run(run())


def test_who_gives_up_while_it_is_submitted_leaves_nothing_behind() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        async with link_engine(engine) as served:
            task = asyncio.create_task(served.submit(request("a", "endless", told)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.aborted == ["a"])
            await until(lambda: engine.stats().running == 0)

    asyncio.run(run())


def test_an_engine_that_dies_ends_what_runs_and_takes_nothing_more() -> None:
    async def run() -> None:
        engine, told = FakeEngine(), HeardEvents([])
        async with link_engine(engine) as served:
            await served.submit(request("a", "endless", told))
            await until(lambda: len(told.events) > 3)
            engine.die()
            await until(lambda: told.ended)
            last = told.events[-1]
            assert last.finish_reason is FinishReason.ABORT and last.may_retry
            assert served.ended and not served.healthy
            with pytest.raises(EngineError, match="stopped"):
                await served.submit(request("b", "abc", told))

    asyncio.run(run())


def test_an_api_process_that_goes_leaves_nothing_behind_and_others_go_on() -> None:
    async def run() -> None:
        engine, gone, kept = FakeEngine(), HeardEvents([]), HeardEvents([])
        port = EnginePort(engine)
        ends = [socket.socketpair() for _ in range(2)]
        serving = [asyncio.create_task(port.serve(there)) for _, there in ends]
        engines = [
            RemoteEngine(EngineNature.of(engine), lambda here=here: here, lambda grace_s: None)
            for here, _ in ends
        ]
        for one in engines:
            await one.start()
        engine.start()
        await engines[0].submit(request("gone", "endless", gone))
        await engines[1].submit(request("kept", "endless", kept))
        await until(lambda: len(gone.events) > 2 and len(kept.events) > 2)
        assert port.answers == 2
        ends[0][0].shutdown(socket.SHUT_RDWR)  # as if it was killed
        await until(lambda: engine.aborted == ["gone"])
        assert port.answers == 1
        seen = len(kept.events)
        await until(lambda: len(kept.events) > seen + 3)
        await engines[1].stop()
        await until(lambda: engine.stats().running == 0)
        engine.stop()
        await asyncio.gather(*serving)

    asyncio.run(run())
