"""Runs of one load through several engines in turns, and what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.speculation.engines import MeasuredEngine, Tally
from tangram.engine.loop import Engine
from tangram.errors import TangramError
from tangram.lab.load.clock import TimedAnswer
from tangram.types import Event, FinishReason, Request, SamplingParams

Prompt = tuple[int, ...]


GREEDY = SamplingParams(temperature=0.0)


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
        self._seconds: dict[int, list[float]] = {}

    def add(self, seconds: float) -> None:
        """A step that took `seconds` has ended."""
        counts, drafted = _counts(self._tally), 0
        if counts and (drafts := counts["drafts"] - self._seen["drafts"]):
            drafted = round((counts["drafted"] - self._seen["drafted"]) / drafts)
        self._seen = counts
        self._seconds.setdefault(drafted, []).append(seconds)

    def figures(self) -> dict[str, Any]:
        """By number: how many steps, their median in ms, and all of them in s."""
        return {
            str(drafted): {"steps": len(own), "p50_ms": median(own) * 1e3, "total_s": sum(own)}
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
    times = StepTimes(measured.tally)
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
    own = {"preemptions": preemptions, "steps": times.figures()}
    return summarise(answers, counts) | own, answers


def _counts(tally: Tally | None) -> dict[str, int]:
    return {} if tally is None else tally.figures()


def summarise(answers: Sequence[TimedAnswer], counts: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a run. Decode is from the last first token to the last token.

    An iteration of a sequence is one model token and the accepted drafts before it.
    """
    first_s = max(answer.times_s[0] for answer in answers)
    last_s = max(answer.times_s[-1] for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    after = sum(at_s > first_s for answer in answers for at_s in answer.times_s)
    per_token_ms = [value * 1e3 for one in answers if (value := one.per_token_s) is not None]
    found: dict[str, Any] = {
        "seconds": last_s,
        "prefill_s": first_s,
        "decode_s": last_s - first_s,
        "decode_tokens": after,
        "decode_tokens_per_s": after / (last_s - first_s) if last_s > first_s else None,
        "output_tokens": tokens,
        "tokens_per_s": tokens / last_s,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "tpot_ms": {
            "mean": fmean(per_token_ms),
            **{f"p{percent}": float(np.percentile(per_token_ms, percent)) for percent in (50, 90)},
        }
        if per_token_ms
        else {},
    }
    return found | ({"speculation": _shares(counts, tokens - len(answers))} if counts else {})


def _shares(counts: Mapping[str, int], decoded: int) -> dict[str, Any]:
    # Accepted drafts behind an end token are no tokens of an answer.
    iterations = max(decoded - counts["accepted"], counts["drafts"])
    return {
        **counts,
        "iterations": iterations,
        "acceptance": counts["accepted"] / counts["compared"] if counts["compared"] else None,
        "drafted_per_iteration": counts["drafted"] / iterations if iterations else None,
        "tokens_per_iteration": 1 + counts["accepted"] / iterations if iterations else None,
    }


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
