"""The bound of the queue, and how long those should stay away whom it refuses."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from tangram.errors import OverloadError

_MEASURED_STARTS = 64
_MOST_WAIT_S = 60


class Intake:
    """Whoever comes while fewer than `most_waiting` completions wait is taken in; None takes in everybody. One thread
    at a time.

    Where they leave the queue at `r` a second, `w` of them are gone in `w / r` seconds: that is what a refused one
    is told, at least 1 s and, because by then others may have given up, at most a minute.
    """

    def __init__(self, most_waiting: int | None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._most_waiting, self._clock_s = most_waiting, clock_s
        self._starts_s: deque[float] = deque(maxlen=_MEASURED_STARTS)

    def started(self) -> None:
        """A completion has left the queue."""
        self._starts_s.append(self._clock_s())

    def check(self, waiting: int) -> None:
        """Raise `OverloadError` if `waiting` completions are as many as may wait."""
        if self._most_waiting is None or waiting < self._most_waiting:
            return
        raise OverloadError(
            f"{waiting} completions wait, max_queue is {self._most_waiting}: try again later, or have the server "
            f"started with a longer queue",
            self._retry_after_s(waiting),
        )

    def _retry_after_s(self, waiting: int) -> int:
        if not self._starts_s:
            return 1
        measured_s = self._clock_s() - self._starts_s[0]
        return min(_MOST_WAIT_S, max(1, math.ceil(waiting * measured_s / len(self._starts_s))))
