"""Who runs is not slowed down by who waits."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from transformers import PretrainedConfig

from tangram.engine.llm import LLM
from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.core.cpu.test_purity import TINY
from tests.small_engines import check_books, drain, small_engine

PLACES = 4
STEPS = 120
RUNNING = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
WAITING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def seconds_per_step(llm: LLM, crowd: int) -> float:
    """The median step while all places decode and `crowd` requests wait."""
    engine = llm.engine
    engine.clear_cache()
    events = list[Event]()
    for number in range(PLACES):
        prompt = tuple(3 + (at * (number + 2)) % 200 for at in range(40))
        engine.submit(Request(f"running {number}", prompt, RUNNING, events.append))
    while len(events) < 10 * PLACES:
        engine.step()
    for number in range(crowd):
        prompt = tuple(3 + (at * (number + 5)) % 200 for at in range(60))
        engine.submit(Request(f"waiting {number}", prompt, WAITING, lambda event: None))
    engine.step()
    assert engine.stats().waiting == crowd
    taken_s = []
    while engine.stats().waiting == crowd and len(taken_s) < STEPS:
        begin_s = time.perf_counter()
        engine.step()
        taken_s.append(time.perf_counter() - begin_s)
    assert len(taken_s) == STEPS, "somebody who waits pushed in"
    while engine.busy:
        engine.step()
    check_books(engine)
    return statistics.median(taken_s)


@pytest.fixture(scope="module")
def overload(small_llm: LLM) -> tuple[float, float]:
    """Seconds a step with nobody waiting and with ten times as many as there are places, each the
    best of three.
    """
    tried = [
        (seconds_per_step(small_llm, 0), seconds_per_step(small_llm, 10 * PLACES)) for _ in range(3)
    ]
    exact, crowded = zip(*tried, strict=True)
    return min(exact), min(crowded)


@pytest.mark.serial
def test_running_requests_keep_their_pace_while_ten_times_as_many_wait(
    overload: tuple[float, float],
) -> None:
    exact_s, crowded_s = overload
    assert crowded_s < 2 * exact_s + 0.002


def test_each_step_of_an_overload_gives_everybody_who_runs_a_token(small_llm: LLM) -> None:
    """What joins takes part of a step's tokens, so nobody who runs waits longer than for one full
    step.
    """
    engine = small_llm.engine
    events = list[Event]()
    engine.submit(Request("running", (5, 6, 7), RUNNING, events.append))
    engine.step()
    for number in range(10 * PLACES):
        prompt = tuple(3 + (at * (number + 7)) % 200 for at in range(90))
        engine.submit(Request(f"crowd {number}", prompt, WAITING, lambda event: None))
    while engine.stats().waiting:
        before = len(events)
        engine.step()
        assert len(events) == before + 1
    engine.abort("running")
    while engine.busy:
        engine.step()


def count_instructions(work: Callable[[], object]) -> int:
    """How many instructions the interpreter executes for `work`, on any load the same."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks once, when tracing begins
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def instructions_of(engine: Engine, crowd: int) -> tuple[int, int]:
    """Those of a step while `crowd` requests wait, and of one that begins with an abort of one."""
    for number in range(PLACES + crowd):
        prompt = tuple(3 + (at * (number + 2)) % 50 for at in range(9))
        engine.submit(Request(str(number), prompt, RUNNING, lambda event: None))
    for _ in range(3):
        engine.step()
    assert engine.stats().waiting == crowd

    def abort() -> None:
        engine.abort(str(PLACES + crowd // 2))
        engine.step()

    steps = [count_instructions(engine.step) for _ in range(5)], count_instructions(abort)
    assert engine.stats().waiting == crowd - 1
    for number in range(PLACES + crowd):
        engine.abort(str(number))
    drain(engine)
    return min(steps[0]), steps[1]


def test_a_step_does_not_look_at_those_who_wait(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    engine = small_engine(adopt_tiny(TINY), max_num_seqs=PLACES)
    few, many = instructions_of(engine, 10), instructions_of(engine, 3000)
    for one, other in zip(few, many, strict=True):
        assert other < 1.1 * one
