"""The soak's laws fail when what they guard is broken, and its askers tell answers from losses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import httpx
import pytest

from bench.stress.conversations import (
    MOST_TURNS,
    Message,
    Outcome,
    UserTurn,
    ask,
    conversation,
    hold,
)
from bench.stress.guidellm_load import LoadError, summary
from bench.stress.heap import EVERY_BYTE
from bench.stress.laws import Growth, ServerSample, find_broken_laws, growth
from bench.stress.overload import find_broken_laws as slowed
from bench.stress.server import GaugeReading
from tests.mentions import mentioning, mentions

SOUND = GaugeReading(running=1, waiting=0, held=10, cached=20, free=70, total=100)
FLAT = Growth(mb_per_hour=10.0, standard_error=2.0, over_s=960.0, first_mb=500.0, last_mb=502.0)
ANSWERED = [Outcome(0.0, stream=True, kind="answered", token_s=[1.0], ended_s=2.0)] * 3
ENDS = {"length": 3}
MESSAGES: list[Message] = [{"role": "user", "content": "Count to ten."}]


def samples(
    mb_per_hour: float, count: int = 100, gauges: GaugeReading = SOUND
) -> list[ServerSample]:
    noise = Random(0)
    heap = [500 + mb_per_hour * at / 360 + noise.uniform(-3, 3) for at in range(count)]
    # The allocator's gaps grow by 100 MB an hour, whatever is in use.
    return [
        ServerSample(at * 10.0, 1000 + mb + 100 * at / 360, mb, gauges)
        for at, mb in enumerate(heap)
    ]


def heap_growth(found: list[ServerSample]) -> Growth:
    return growth(found, "heap_mb")


def test_all_is_well_when_nothing_is_lost_and_nothing_grows() -> None:
    assert (
        find_broken_laws(ANSWERED, samples(0.0), heap_growth(samples(0.0)), ENDS, changed=0) == []
    )


def test_each_broken_law_is_named() -> None:
    lost = replace(ANSWERED[0], kind="lost", reason="status 500")
    leaking = replace(SOUND, free=69)
    for words, found in {
        "status 500": find_broken_laws([*ANSWERED, lost], [], FLAT, ENDS, 0),
        "differed when requested again": find_broken_laws(ANSWERED, [], FLAT, ENDS, 1),
        "are not 100": find_broken_laws(ANSWERED, samples(0.0, gauges=leaking)[:1], FLAT, ENDS, 0),
        "heap grew": find_broken_laws(ANSWERED, [], heap_growth(samples(200.0)), ENDS, 0),
        "counts 2": find_broken_laws(ANSWERED, [], FLAT, {"length": 2}, 0),
        "given up": find_broken_laws(ANSWERED, [], FLAT, {"length": 3, "abort": 1}, 0),
    }.items():
        assert len(found) == 1 and words in found[0], found


def test_an_overload_that_is_noticed_or_loses_somebody_is_named() -> None:
    def answers(gap_s: float) -> list[Outcome]:
        return [
            replace(ANSWERED[0], status=200, token_s=[1.0 + gap_s * at for at in range(64)])
        ] * 3

    turned_away = Outcome(0.0, stream=True, status=429, retry_after_s=2.0)
    assert slowed(answers(0.1), [*answers(0.14), turned_away]) == []
    for words, found in {
        "p50 of the time between pieces was 0.160": slowed(
            answers(0.1), [*answers(0.16), turned_away]
        ),
        "lost": slowed(
            answers(0.1), [*answers(0.1), turned_away, replace(turned_away, retry_after_s=None)]
        ),
        "no overload": slowed(answers(0.1), answers(0.1)),
        "no answer": slowed(answers(0.1), [turned_away]),
    }.items():
        assert words in found[0], found


def test_a_slope_is_found_within_its_error() -> None:
    found = heap_growth(samples(120.0))
    assert abs(found.mb_per_hour - 120.0) < 3 * found.standard_error
    assert found.over_s == pytest.approx(790.0)


@pytest.mark.parametrize("leak_mb_per_hour, grew", [(0.0, False), (150.0, True)])
def test_what_is_held_for_a_minute_is_no_growth_and_hides_none(
    leak_mb_per_hour: float, grew: bool
) -> None:
    """Long prompts that come in the second half leave 50 MB with the allocator for 80 s
    at a time.
    """
    uneven = [
        replace(sample, heap_mb=sample.heap_mb + (50 if number > 50 and number % 16 < 8 else 0))
        for number, sample in enumerate(samples(leak_mb_per_hour, count=120))
    ]
    assert (
        any(
            "heap grew" in law
            for law in find_broken_laws(ANSWERED, [], heap_growth(uneven), ENDS, 0)
        )
        == grew
    )


def test_a_step_near_the_end_is_growth() -> None:
    """What begins in the last tenth and stays."""
    late = [
        replace(one, heap_mb=one.heap_mb + (50 if number >= 90 else 0))
        for number, one in enumerate(samples(0.0))
    ]
    assert any(
        "heap grew" in law for law in find_broken_laws(ANSWERED, [], heap_growth(late), ENDS, 0)
    )


def test_the_heap_count_knows_what_is_in_use_and_what_is_free_again() -> None:
    """Of a process of its own: a million small objects of Python, then large blocks of the C
    library.
    """
    script = """if True:
        import ctypes
        from bench.stress.heap import counter
        count, libc = counter(), ctypes.CDLL("libc.so.6")
        libc.malloc.restype = ctypes.c_void_p
        def in_use():
            now = count()
            return now.uordblks + now.hblkhd
        empty = in_use(); floats = [float(number) for number in range(10**6)]
        small = in_use(); blocks = [libc.malloc(10**7) for _ in range(5)]
        large = in_use(); del floats
        for block in blocks: libc.free(ctypes.c_void_p(block))
        print(small - empty, large - small, in_use() - empty)
    """
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | EVERY_BYTE, capture_output=True, check=True
    )
    small, large, left = map(int, ended.stdout.split())
    assert 24e6 <= small < 60e6 and 50e6 <= large < 51e6 and left < 1e6


def test_held_pages_are_not_the_baseline() -> None:
    assert SOUND.problems(idle=False) == []
    assert mentions(SOUND.problems(idle=True)[0], "baseline")
    assert replace(SOUND, running=0, held=0, free=80).problems(idle=True) == []


def test_a_failed_request_fails_the_load() -> None:
    totals = {"successful": 3, "errored": 1, "total": 4, "incomplete": 0}
    requests = {"errored": [{"info": {"error": "status 400"}}]}
    report = {
        "benchmarks": [
            {"metrics": {"request_totals": totals}, "requests": requests, "duration": 1.0}
        ]
    }
    with pytest.raises(LoadError, match=mentioning("1 4 400")):
        summary(report)


def test_askers_see_the_same_answer_streamed_and_whole_and_can_hang_up(server_url: str) -> None:
    async def talk() -> list[Outcome]:
        async with httpx.AsyncClient(base_url=server_url, timeout=60) as client:
            turns = [
                UserTurn("", 8, stream=stream, patience_s=patience)
                for stream in (True, False)
                for patience in (None, 0.02)
            ]
            refused = UserTurn("", 10**6, stream=True, patience_s=None)
            return [await ask(client, MESSAGES, turn) for turn in (*turns, refused)]

    streamed, gone, whole, gone_too, refused = asyncio.run(talk())
    assert (streamed.kind, whole.kind) == (
        "answered",
        "answered",
    ) and streamed.text == whole.text != ""
    assert streamed.ttft_s is not None and whole.ttft_s is None
    assert (gone.kind, gone_too.kind) == ("hung up", "hung up")
    assert refused.kind == "lost" and "status 400" in refused.reason


def test_a_conversation_brings_what_was_said_and_ends_with_who_hangs_up(server_url: str) -> None:
    async def talk(turns: list[UserTurn]) -> list[Outcome]:
        async with httpx.AsyncClient(base_url=server_url, timeout=60) as client:
            return [outcome async for outcome in hold(client, turns)]

    patient, gone = (
        UserTurn("Hello.", 4, stream=True, patience_s=None),
        UserTurn("Go on.", 400, stream=False, patience_s=0.05),
    )
    first, second = asyncio.run(talk([patient, gone, patient]))
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[1]["content"] == first.text
    assert (first.kind, second.kind) == ("answered", "hung up")


def test_conversations_differ_and_end_with_who_hangs_up() -> None:
    random = Random(1)
    many = [conversation(random) for _ in range(300)]
    assert {len(turns) for turns in many} == set(range(1, MOST_TURNS + 1))
    assert all(turn.patience_s is None for turns in many for turn in turns[:-1])
    impatient = sum(turns[-1].patience_s is not None for turns in many)
    assert 30 < impatient < 150
