"""The server over the last hour: a line every ten seconds, from the engine's own numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from tangram.metrics import EngineStats
from tangram.serve.activity import Activity
from tangram.serve.bodies.body import Json
from tangram.web.questions import AnswerTimes

STEP_S = 10
MOST_S = 3600
# Of one line: more requests are not needed for a percentile.
_MOST_TIMES = 10_000


@dataclass(frozen=True)
class Line:
    """What happened in `STEP_S` seconds before `at`, and the state then.

    Rates are tokens per second. Times are seconds, of requests that ended; None if none did.
    `cached_share` is of the prompt tokens that came into the batch; None if there were none.
    """

    at: float
    throughput: float
    prompt_throughput: float
    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    tpot_p90: float | None
    queue: int
    running: int
    pages_held: int
    pages_cached: int
    pages_free: int
    cached_share: float | None


class History:
    """Lines of the last hour. Times are of the monotonic clock, `begin_s` is zero."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._lines: deque[Line] = deque(maxlen=MOST_S // STEP_S)
        self._before: tuple[EngineStats, float] | None = None
        self._ttft: deque[float] = deque(maxlen=_MOST_TIMES)
        self._tpot: deque[float] = deque(maxlen=_MOST_TIMES)

    def count(self, times: AnswerTimes) -> None:
        """A request has ended."""
        self._ttft.append(times.first_token_s)
        if times.token_s is not None:
            self._tpot.append(times.token_s)

    def sample(self, stats: EngineStats, now_s: float) -> None:
        """The engine at `now_s`: a line, unless it is the first reading."""
        before, self._before = self._before, (stats, now_s)
        if before is not None:
            self._lines.append(self._line(*before, stats, now_s))
            self._ttft.clear()
            self._tpot.clear()

    def read(self, seconds: int) -> Json:
        """The lines of the last `seconds`, one list for each number."""
        lines = list(self._lines)[-(seconds // STEP_S) :] if seconds >= STEP_S else []
        told = [asdict(line) for line in lines]
        return {"step_s": STEP_S} | {
            field.name: [line[field.name] for line in told] for field in fields(Line)
        }

    def _line(self, before: EngineStats, before_s: float, now: EngineStats, now_s: float) -> Line:
        activity = Activity.between(before, now, now_s - before_s)
        return Line(
            at=now_s - self._begin_s,
            throughput=activity.generated_tokens_per_s,
            prompt_throughput=activity.prompt_tokens_per_s,
            ttft_p50=percentile(self._ttft, 50),
            ttft_p90=percentile(self._ttft, 90),
            tpot_p50=percentile(self._tpot, 50),
            tpot_p90=percentile(self._tpot, 90),
            queue=now.waiting,
            running=now.running,
            pages_held=now.pages_held,
            pages_cached=now.pages_cached,
            pages_free=now.pages_free,
            cached_share=activity.reused_share,
        )


def percentile(values: Sequence[float], share: int) -> float | None:
    """The value that `share` percent of `values` do not exceed, interpolated; None of none."""
    return float(np.percentile(values, share)) if values else None
