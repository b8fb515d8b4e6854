"""Requests through an engine in this process, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tangram.errors import ConfigError, TangramError
from tangram.lab.load.asks import Ask
from tangram.types import Event, FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from tangram.engine.loop import Engine


@dataclass
class TimedAnswer:
    """What came of one `Ask`; times in seconds from the start of all."""

    asked_s: float
    prompt_tokens: int
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        """From asking to the first token (TTFT)."""
        return self.times_s[0] - self.asked_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first (TPOT); None where there was one."""
        return (
            (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)
            if len(self.times_s) > 1
            else None
        )


@dataclass(frozen=True)
class LatencyLimits:
    """What a request must meet to count as goodput; None is no limit."""

    ttft_s: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_ms"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"the limit of {name} is {value}, it must be greater than 0")

    def accept(self, answer: TimedAnswer) -> bool:
        """Whether `answer` came in time."""
        in_time = self.ttft_s is None or answer.first_token_s <= self.ttft_s
        per_token = answer.per_token_s
        return in_time and (
            self.tpot_ms is None or per_token is None or per_token * 1e3 <= self.tpot_ms
        )


@dataclass(frozen=True)
class Patience:
    """A run is given up once more than `share` of its requests have waited longer than `ttft_s` for
    a first token.
    """

    ttft_s: float
    share: float = 0.1
    every_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.ttft_s > 0:
            raise ConfigError(
                f"the longest wait for a first token is {self.ttft_s} s, it must be greater than 0"
            )

    def ends(self, answers: Sequence[TimedAnswer], now_s: float) -> bool:
        """Whether too many are late at `now_s`; who has not asked yet is not."""
        late = sum(self._wait_s(one, now_s) > self.ttft_s for one in answers)
        return late > self.share * len(answers)

    def give_up(self, answers: Sequence[TimedAnswer], now_s: float) -> GivenUpError:
        """What is raised when it ends at `now_s`: how long those who had asked by then waited, the
        waiting included.
        """
        waits_s = [self._wait_s(one, now_s) for one in answers if one.asked_s <= now_s]
        found = _percentiles(waits_s)
        return GivenUpError(
            f"given up after {now_s:.0f} s: more than {self.share:.0%} waited over {self.ttft_s} "
            f"s; {len(waits_s)} had asked, half of them waited {found['p50']:.1f} s or more, a "
            f"tenth {found['p90']:.1f} s"
        )

    @staticmethod
    def _wait_s(answer: TimedAnswer, now_s: float) -> float:
        return (answer.times_s[0] if answer.times_s else now_s) - answer.asked_s


class GivenUpError(TangramError):
    """A run was ended because too many of its requests waited too long."""


def answer_all(
    engine: Engine,
    asks: Sequence[Ask],
    progress: Callable[[int], None] = lambda done: None,
    started: Callable[[], None] = lambda: None,
    patience: Patience | None = None,
) -> list[TimedAnswer]:
    """All of `asks`, each at its time, greedily and to the last token.

    `progress` hears how many are done, `started` when every one has its first token.

    Raises `RequestError` if one can never fit, `GivenUpError` where `patience` ends, when nothing
    runs any more, and `TangramError` if the engine gives one up.
    """
    done, unstarted, lost, look_s = 0, len(asks), False, 0.0
    answers = [TimedAnswer(ask.at_s, len(ask.tokens)) for ask in asks]

    def take(answer: TimedAnswer, event: Event) -> None:
        nonlocal done, unstarted
        if event.finish_reason is FinishReason.ABORT and lost:
            return
        if event.finish_reason is FinishReason.ABORT:
            raise TangramError(f"a request was ended by the engine: {event.error}")
        first = not answer.times_s and bool(event.token_ids)
        answer.times_s += [time.perf_counter() - begin] * len(event.token_ids)
        answer.token_ids += event.token_ids
        answer.cached_tokens = event.usage.cached_tokens
        if event.finish_reason is not None:
            done += 1
            progress(done)
        unstarted -= first
        if first and not unstarted:
            started()

    requests = [
        Request(
            str(number),
            ask.tokens,
            SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True),
            lambda event, answer=answer: take(answer, event),  # type: ignore[misc]
        )
        for number, (ask, answer) in enumerate(zip(asks, answers, strict=True))
    ]
    for request in requests:
        engine.check(request)
    begin = time.perf_counter()
    waiting = sorted(range(len(asks)), key=lambda number: asks[number].at_s, reverse=True)
    while waiting or engine.busy:
        now = time.perf_counter() - begin
        while waiting and asks[waiting[-1]].at_s <= now:
            engine.submit(requests[waiting.pop()])
        if patience is not None and not lost and now >= look_s:
            look_s, lost = now + patience.every_s, patience.ends(answers, now)
            if lost:
                waiting.clear()
                for request in requests:
                    engine.abort(request.request_id)
        if not engine.step() and waiting:
            time.sleep(max(0.0, asks[waiting[-1]].at_s - (time.perf_counter() - begin)))
    if patience is not None and (lost or patience.ends(answers, time.perf_counter() - begin)):
        raise patience.give_up(answers, time.perf_counter() - begin)
    return answers


NO_LIMITS = LatencyLimits()


@dataclass(frozen=True)
class Summary:
    """Answers in a few figures; percentiles are those of requests, `goodput_per_s` counts those
    within `limits`.
    """

    requests: int
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    cached_share: float
    ttft_s: dict[str, float]
    tpot_ms: dict[str, float]
    limits: LatencyLimits
    goodput_per_s: float

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer], limits: LatencyLimits = NO_LIMITS) -> Summary:
        """Of at least one answer; goodput counts those that meet `limits`."""
        seconds = max(answer.times_s[-1] for answer in answers) - min(
            answer.asked_s for answer in answers
        )
        prompt, output = (
            sum(values)
            for values in ((a.prompt_tokens for a in answers), (len(a.token_ids) for a in answers))
        )
        per_token = [value * 1e3 for answer in answers if (value := answer.per_token_s) is not None]
        return cls(
            len(answers),
            seconds,
            len(answers) / seconds,
            prompt,
            output,
            (prompt + output) / seconds,
            sum(answer.cached_tokens for answer in answers) / prompt,
            _percentiles([answer.first_token_s for answer in answers]),
            _percentiles(per_token),
            limits,
            sum(map(limits.accept, answers)) / seconds,
        )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)} if values else {}
