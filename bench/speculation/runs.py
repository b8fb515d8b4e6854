"""Runs of one load through several engines in turns, and what is kept of them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import nlargest
from itertools import count
from statistics import median
from typing import Any

from bench.speculation.engines import MeasuredEngine, Tally
from bench.speculation.report import summarise
from tangram.engine.loop import Engine
from tangram.errors import TangramError
from tangram.types import Event, FinishReason, Request, SamplingParams
from tangram_lab.load.clock import TimedAnswer

Prompt = tuple[int, ...]


GREEDY = SamplingParams.state_all(temperature=0.0)
LONGEST_STEPS = 5  # that are kept of each number of drafts


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    output_tokens: int,
    *,
    to_the_end: bool,
    sampling: SamplingParams = GREEDY,
    on_step: Callable[[float], None] = lambda seconds: None,
) -> list[TimedAnswer]:
    """Answers to `prompts`, all asked at once; with `to_the_end` an end token ends none.

    `on_step` gets the seconds of each step.
    """
    answers = [TimedAnswer(0.0, len(prompt)) for prompt in prompts]
    sampling = replace(sampling, max_tokens=output_tokens, ignore_eos=to_the_end)
    begin_s = time.perf_counter()
    requests = [
        Request(str(number), prompt, sampling, partial(_take, answer, begin_s))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    engine.submit(*requests)
    while engine.busy:
        step_s = time.perf_counter()
        engine.step()
        on_step(time.perf_counter() - step_s)
    return answers


class StepTimes:
    """The seconds of steps, by the tokens that were drafted for a sequence, rounded."""

    def __init__(self, tally: Tally | None) -> None:
        self._tally = tally
        self._seen = _counts(tally)
        self._steps = count()
        self._seconds: dict[int, list[tuple[float, int]]] = {}  # and which step of the run

    def add(self, seconds: float) -> None:
        """A step that took `seconds` has ended."""
        counts, drafted = _counts(self._tally), 0
        if counts and (drafts := counts["drafts"] - self._seen["drafts"]):
            drafted = round((counts["drafted"] - self._seen["drafted"]) / drafts)
        self._seen = counts
        self._seconds.setdefault(drafted, []).append((seconds, next(self._steps)))

    def figures(self) -> dict[str, Any]:
        """By number: how many steps, their median in ms, and all of them in s.

        Also the longest ones in ms, each with its number in the run.
        """
        return {
            str(drafted): {
                "steps": len(own),
                "p50_ms": median(seconds for seconds, _ in own) * 1e3,
                "total_s": sum(seconds for seconds, _ in own),
                "longest_ms": [
                    [seconds * 1e3, step] for seconds, step in nlargest(LONGEST_STEPS, own)
                ],
            }
            for drafted, own in sorted(self._seconds.items())
        }


def _take(answer: TimedAnswer, begin_s: float, event: Event) -> None:
    if event.finish_reason is FinishReason.ABORT:
        raise TangramError(f"a request was ended by the engine: {event.error}")
    answer.times_s += [time.perf_counter() - begin_s] * len(event.token_ids)
    answer.token_ids += event.token_ids
    answer.cached_tokens = event.usage.cached_tokens


def measure_run(
    measured: MeasuredEngine,
    prompts: Sequence[Prompt],
    output_tokens: int,
    *,
    to_the_end: bool,
    sampling: SamplingParams = GREEDY,
) -> tuple[dict[str, Any], list[TimedAnswer]]:
    """One run's figures, and its answers; see `answer_prompts`."""
    before, preempted = _counts(measured.tally), measured.engine.stats().preemptions
    times, host = StepTimes(measured.tally), resource.getrusage(resource.RUSAGE_SELF)
    answers = answer_prompts(
        measured.engine,
        prompts,
        output_tokens,
        to_the_end=to_the_end,
        sampling=sampling,
        on_step=times.add,
    )
    counts = {name: count - before[name] for name, count in _counts(measured.tally).items()}
    preemptions = measured.engine.stats().preemptions - preempted
    own = {"preemptions": preemptions, "steps": times.figures(), "host": _host_since(host)}
    return summarise(answers, counts) | own, answers


def _host_since(before: resource.struct_rusage) -> dict[str, float]:
    """What the process had of the host: seconds of cores, and what kept it from them."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime,
        "system_s": now.ru_stime - before.ru_stime,
        "preempted": now.ru_nivcsw - before.ru_nivcsw,
        "waited": now.ru_nvcsw - before.ru_nvcsw,
        "page_faults": now.ru_minflt + now.ru_majflt - before.ru_minflt - before.ru_majflt,
    }


def _counts(tally: Tally | None) -> dict[str, int]:
    return {} if tally is None else tally.figures()


def find_differences(
    answers: Sequence[TimedAnswer], others: Sequence[TimedAnswer]
) -> list[tuple[int, int]]:
    """The number of each answer that differs, and the place of its first token that does."""
    found = []
    for number, (one, other) in enumerate(zip(answers, others, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shortest = min(len(one.token_ids), len(other.token_ids))
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), shortest)
            found.append((number, place))
    return found
