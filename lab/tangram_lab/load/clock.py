"""Runs requests through an engine in this process, and measures their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tangram.errors import ConfigError, TangramError
from tangram.types import Event, FinishReason, Request, SamplingParams
from tangram_lab.load.asks import Ask

if TYPE_CHECKING:
    from tangram.engine.loop import Engine


@dataclass
class TimedAnswer:
    """The answer to one `Ask`; times in seconds from the start of the run."""

    asked_s: float
    prompt_tokens: int
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        """From the request to the first token (TTFT)."""
        return self.times_s[0] - self.asked_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first (TPOT); None for a single token."""
        return (
            (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)
            if len(self.times_s) > 1
            else None
        )


@dataclass(frozen=True)
class LatencyLimits:
    """The limits of a request that counts as goodput; None is no limit."""

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
    """The limit at which a run is given up.

    It is reached when more than `share` of the requests wait longer than `ttft_s` for a first
    token.
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
        """Whether too many requests are late at `now_s`; requests of a later time are not."""
        return self.is_lost(sum(self.is_late(one, now_s) for one in answers), len(answers))

    def is_late(self, answer: TimedAnswer, now_s: float) -> bool:
        """Whether it waits longer for its first token at `now_s`, or has waited longer."""
        return self._wait_s(answer, now_s) > self.ttft_s

    def is_lost(self, late: int, requests: int) -> bool:
        """Whether so many late ones are too many of all requests."""
        return late > self.share * requests

    def give_up(self, answers: Sequence[TimedAnswer], now_s: float) -> GivenUpError:
        """The error of a run that ends at `now_s`, with the waits of all requests sent by then."""
        waits_s = [self._wait_s(one, now_s) for one in answers if one.asked_s <= now_s]
        found = _percentiles(waits_s)
        return GivenUpError(
            f"given up after {now_s:.0f} s: more than {self.share:.0%} waited over {self.ttft_s} "
            f"s; {len(waits_s)} were sent, half of them waited {found['p50']:.1f} s or more, a "
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
    """Answer all of `asks`, each at its time, greedily and to the last token.

    `progress` takes the number of answers done. `started` is called when each has its first token.

    Raises `RequestError` if a request can never fit, and `TangramError` if the engine gives one up.
    Raises `GivenUpError` when `patience` ends; no request runs any more then.
    """
    run = _Run(engine, asks, progress, started, patience)
    run.go()
    return run.answers


class _Run:
    """One `answer_all`. All times are in seconds since it began."""

    def __init__(
        self,
        engine: Engine,
        asks: Sequence[Ask],
        progress: Callable[[int], None],
        started: Callable[[], None],
        patience: Patience | None,
    ) -> None:
        self.answers = [TimedAnswer(ask.at_s, len(ask.tokens)) for ask in asks]
        self._engine, self._asks, self._patience = engine, asks, patience
        self._progress, self._started = progress, started
        self._done, self._unstarted, self._lost, self._look_s = 0, len(asks), False, 0.0
        # By time, the first at the end
        self._waiting = sorted(range(len(asks)), key=lambda n: asks[n].at_s, reverse=True)
        self._requests = [
            Request(
                str(number),
                ask.tokens,
                SamplingParams.state_all(
                    temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True
                ),
                partial(self._take, answer),
            )
            for number, (ask, answer) in enumerate(zip(asks, self.answers, strict=True))
        ]
        for request in self._requests:
            engine.check(request)
        self._begin = time.perf_counter()

    def go(self) -> None:
        """Submit each request at its time, and step the engine until all have ended."""
        while self._waiting or self._engine.busy:
            self._submit_due()
            self._look()
            if not self._engine.step() and self._waiting:
                time.sleep(max(0.0, self._next_s() - self._now_s()))
        if self._patience is not None and (
            self._lost or self._patience.ends(self.answers, self._now_s())
        ):
            raise self._patience.give_up(self.answers, self._now_s())

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin

    def _next_s(self) -> float:
        return self._asks[self._waiting[-1]].at_s

    def _submit_due(self) -> None:
        now_s = self._now_s()
        while self._waiting and self._next_s() <= now_s:
            self._engine.submit(self._requests[self._waiting.pop()])

    def _look(self) -> None:
        """At intervals, check patience; once it is lost, abort all requests."""
        now_s = self._now_s()
        if self._patience is None or self._lost or now_s < self._look_s:
            return
        self._look_s = now_s + self._patience.every_s
        self._lost = self._patience.ends(self.answers, now_s)
        if self._lost:
            self._waiting.clear()
            for request in self._requests:
                self._engine.abort(request.request_id)

    def _take(self, answer: TimedAnswer, event: Event) -> None:
        if event.finish_reason is FinishReason.ABORT and self._lost:
            return
        if event.finish_reason is FinishReason.ABORT:
            raise TangramError(f"a request was ended by the engine: {event.error}")
        first = not answer.times_s and bool(event.token_ids)
        answer.times_s += [self._now_s()] * len(event.token_ids)
        answer.token_ids += event.token_ids
        answer.cached_tokens = event.usage.cached_tokens
        if event.finish_reason is not None:
            self._done += 1
            self._progress(self._done)
        self._unstarted -= first
        if first and not self._unstarted:
            self._started()


NO_LIMITS = LatencyLimits()


@dataclass(frozen=True)
class Summary:
    """A summary of answers.

    Percentiles are over requests; `goodput_per_s` counts those within `limits`.
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
        """The summary of at least one answer; goodput counts those that meet `limits`."""
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
