"""What the page keeps and sends: history, conversations, bounded streams, and who may see them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tangram.metrics import EngineStats
from tangram.types import Usage
from tangram.watch import (
    News,
    PageState,
    PoolReading,
    SequenceChange,
    SequenceReading,
    SequenceState,
    StepDone,
)
from tangram.web import collector as collector_module
from tangram.web import requests as page_requests
from tangram.web.collector import Collector
from tangram.web.history import History
from tangram.web.questions import AnswerTimes
from tangram.web.requests import Announcement, Requests, ShownCompletion
from tangram.web.watchers import MOST_PENDING_BYTES, Watcher, frame

STATS = EngineStats(
    running=0,
    waiting=0,
    pages_total=100,
    pages_held=0,
    pages_cached=0,
    pages_free=100,
    pages_promised=0,
    slots_held=0,
    slots_used=0,
    chunk_tokens=10,
    capacity_tokens=100,
    capacity_uncompressed_tokens=100,
    cache_dtype="float32",
    page_bytes=64,
    kv_token_bytes=8,
    kv_bytes_held=0,
    kv_bytes_uncompressed=0,
    prompt_tokens=0,
    cached_tokens=0,
    computed_prompt_tokens=0,
    generated_tokens=0,
    preemptions=0,
    steps=0,
    sealed_chunks=0,
    host_pages_total=0,
    host_page_bytes=64,
    host_pages_used=0,
    restored_tokens=0,
    host_bytes_out=0,
    host_bytes_in=0,
    dropped_spans=0,
    step_s=0.0,
    device_s=0.0,
    sealing_s=0.0,
    lost_diverged=0,
    lost_evicted=0,
    lost_stateless=0,
    plans={},
    overflow=(),
    speculation=None,
)


def test_a_line_of_history_has_rates_of_its_time_and_the_state_at_its_end() -> None:
    history = History(begin_s=90.0)
    history.sample(replace(STATS, generated_tokens=50, prompt_tokens=7), 100.0)
    for first_s, each_s in ((0.1, 0.1), (0.3, 0.25), (0.5, None)):
        history.count(AnswerTimes(first_s, each_s))
    now = replace(
        STATS,
        generated_tokens=150,
        computed_prompt_tokens=300,
        prompt_tokens=407,
        cached_tokens=100,
        running=3,
        waiting=4,
        pages_held=20,
        pages_cached=30,
        pages_free=50,
    )
    history.sample(now, 112.5)
    told = history.read(3600)
    assert (told["step_s"], told["at"]) == (10, [22.5])
    assert (told["throughput"], told["prompt_throughput"]) == ([8.0], [24.0])
    assert told["cached_share"] == [0.25]
    assert told["ttft_p50"] == [pytest.approx(0.3)] and told["ttft_p90"] == [pytest.approx(0.46)]
    assert told["tpot_p50"] == [pytest.approx(0.175)]
    assert [told[name] for name in ("running", "queue")] == [[3], [4]]
    assert [told[f"pages_{name}"] for name in ("held", "cached", "free")] == [[20], [30], [50]]
    history.sample(now, 122.5)
    told = history.read(3600)
    assert {len(values) for name, values in told.items() if name != "step_s"} == {2}
    assert told["ttft_p50"][1] is told["cached_share"][1] is None, "nothing ended or came"
    assert told["throughput"][1] == 0.0


def test_history_forgets_after_an_hour() -> None:
    history = History(begin_s=0.0)
    for number in range(500):
        history.sample(STATS, 10.0 * number)
    assert len(history.read(3600)["at"]) == 360
    assert history.read(60)["at"] == [4940.0, 4950.0, 4960.0, 4970.0, 4980.0, 4990.0]


# -- requests --------------------------------------------------------------------------------------


def reading(
    request_id: str, prompt: list[int], answer: list[int], index: int = 0, ratio: float = 0.5
) -> SequenceReading:
    usage = Usage(len(prompt), len(answer), 0, 0, 0)
    tokens = np.asarray(prompt + answer, np.int64)
    return SequenceReading(request_id, index, ratio, "keydiff", 8, tokens, (), 0, 0, usage, None)


class ToldRequests:
    """Requests, and what an engine tells of them."""

    def __init__(self) -> None:
        self.requests, self.count = Requests(), 0

    def begin(self, prompt: list[int], client: bytes | None = None, **more: Any) -> ShownCompletion:
        self.count += 1
        name = f"req-{self.count}"
        told = Announcement(name, f"chatcmpl-{self.count}", name, 0, client, 0.0)
        self.requests.announce(told)
        found = self.tell(SequenceState.WAITING, reading(name, prompt, [], **more))
        assert found is not None
        return found

    def tell(self, state: SequenceState, now: SequenceReading) -> ShownCompletion | None:
        return self.requests.take(SequenceChange(state, 1.0, now))

    def end(self, one: ShownCompletion, answer: list[int]) -> None:
        before = one.reading
        now = reading(before.request_id, before.tokens.tolist(), answer, before.index)
        self.tell(SequenceState.ENDED, now)


def test_a_turn_continues_the_conversation_whose_prompt_it_begins_with() -> None:
    world = ToldRequests()
    system = [1, 2, 3]
    first = world.begin([*system, 4, 5])
    world.end(first, [6, 7])
    other = world.begin([*system, 9])
    second = world.begin([*system, 4, 5, 6, 7, 8])
    again = world.begin([*system, 4, 5])
    another_client = world.begin([*system, 4, 5, 6], client=b"other")
    lossless = world.begin([*system, 4, 5, 6], ratio=1.0)
    assert first.conversation == second.conversation == again.conversation
    numbers = [first, other, another_client, lossless]
    assert len({one.conversation for one in numbers}) == 4


def test_a_request_is_found_by_both_names_and_each_completion_by_its_number() -> None:
    world = ToldRequests()
    one = world.begin([1, 2], index=0)
    two = world.tell(SequenceState.WAITING, reading("req-1", [1, 2], [], index=1))
    assert world.requests.find("chatcmpl-1", 0) is world.requests.find("req-1", 0) is one
    assert world.requests.find("req-1", 1) is two is not None
    assert two.conversation == one.conversation
    assert world.requests.find("req-2", 0) is None


def test_sequences_of_no_request_are_not_kept() -> None:
    world = ToldRequests()
    assert world.tell(SequenceState.WAITING, reading("batch", [1], [])) is None
    assert world.requests.read(reading("batch", [1], [])) is None


def test_a_reading_that_is_older_than_the_end_changes_nothing() -> None:
    world = ToldRequests()
    one = world.begin([1, 2])
    world.end(one, [3, 4])
    late = reading("req-1", [1, 2], [3])
    assert world.requests.read(late) is one, "its pages are still of its conversation"
    assert one.reading.tokens.tolist() == [1, 2, 3, 4] and not world.requests.running


def test_the_oldest_ended_requests_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_requests, "MOST_REQUESTS", 3)
    world = ToldRequests()
    running = world.begin([0])
    for number in range(1, 6):
        world.end(world.begin([number]), [7])
    found = [world.requests.find(f"req-{at}", 0) is not None for at in range(1, 7)]
    assert found == [True, False, False, False, True, True], "the first one runs"
    world.end(running, [1])
    monkeypatch.setattr(page_requests, "MOST_TOKENS", 4)
    world.end(world.begin([8, 8]), [7])
    assert [world.requests.find(f"req-{at}", 0) is not None for at in (6, 7)] == [False, True]


# -- streams ---------------------------------------------------------------------------------------


def test_a_question_about_the_pool_waits_for_a_reading_of_what_has_happened() -> None:
    class PoolReadings:
        def pool(self) -> PoolReading:
            return PoolReading(states, holders, [], 0, 0, 0)

    states, holders = np.full(4, PageState.CACHED, np.uint8), np.full(4, -1, np.int32)
    step = StepDone(1, 100.0, 0.1, 1, 1, 0, 0, 0, 0, 0)

    async def ask() -> None:
        collector = Collector(4)
        collector.start()
        collector.observe(News(step, [], idle=False), PoolReadings())
        asking = asyncio.create_task(collector.freshen())
        await asyncio.sleep(0)
        assert not asking.done()
        collector.observe(News(None, [], idle=True), PoolReadings())
        await asyncio.wait_for(asking, timeout=30)
        assert (collector.pool.states == PageState.CACHED).all()

    asyncio.run(ask())


@pytest.mark.parametrize(("watchers", "every_s"), [(1, 0.05), (10, 0.08), (64, 0.512)])
def test_many_watchers_are_sent_frames_less_often(
    watchers: int, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what they cost together has a bound."""
    delays: list[float] = []
    loop = SimpleNamespace(
        call_soon_threadsafe=lambda flush: flush(),
        call_later=lambda delay, flush: delays.append(delay),
    )
    monkeypatch.setattr(collector_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    collector = Collector(4)
    monkeypatch.setattr(collector, "_loop", loop)
    for _ in range(watchers):
        collector.enter(Watcher(None))
    step = StepDone(1, 100.0, 0.1, 1, 1, 0, 0, 0, 0, 0)
    for _ in range(3):
        collector.observe(News(step, [], idle=False), NoReadings())
    assert delays == [pytest.approx(every_s)]


class NoReadings:
    """Of an engine in which nothing can be read."""

    def pool(self) -> PoolReading:
        return PoolReading(np.zeros(4, np.uint8), np.full(4, -1, np.int32), [], 0, 0, 0)


def test_a_slow_watcher_loses_frames_and_is_told_so() -> None:
    async def watch() -> list[bytes]:
        watcher = Watcher(None)
        big = frame("step", {"text": "x" * (MOST_PENDING_BYTES // 4)})
        for _ in range(10):
            watcher.send(big)
        came = [await anext(aiter(watcher))]
        watcher.send(frame("step", {"n": 1}))
        watcher.send(b"")
        return [*came, *[part async for part in watcher]]

    late, rest = asyncio.run(watch())
    assert late.count(b"event: step") == 3 and late.endswith(b"event: lost\ndata: {}\n\n")
    assert len(late) <= MOST_PENDING_BYTES + 100
    assert rest == b'event: step\ndata: {"n":1}\n\n'


def test_no_text_breaks_out_of_a_frame() -> None:
    sent = frame("request", {"id": "a\n\nevent: step\ndata: 1"}).decode()
    assert sent.count("\n\n") == 1
    assert json.loads(sent.splitlines()[1].removeprefix("data: "))["id"].startswith("a\n\n")
