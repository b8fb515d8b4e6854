"""The bound of the queue, and how long those should stay away whom it refuses."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from tangram.errors import OverloadError, RequestError

_MEASURED_STARTS = 64
_MOST_WAIT_S = 60


class Intake:
    """Whoever comes while fewer than `most_waiting` completions wait is taken in whole; None takes
    in everybody. Who wants more completions than that and the `places` there are to run never is.
    One thread at a time. `entering` are those that were taken in and are still on their way to the
    queue.

    Where they leave the queue at `r` a second, `w` of them are gone in `w / r` seconds: that is
    what a refused one is told, at least 1 s and, because by then others may have given up, at most
    a minute.
    """

    def __init__(
        self, most_waiting: int | None, places: int, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_waiting, self._places, self._clock_s = most_waiting, places, clock_s
        self.entering = 0
        self._starts_s: deque[float] = deque(maxlen=_MEASURED_STARTS)

    def count_start(self) -> None:
        """A completion has left the queue."""
        self._starts_s.append(self._clock_s())

    def take(self, waiting: int, coming: int, field: str) -> None:
        """Let `coming` completions enter while `waiting` wait.

        Raises `RequestError` (`field`) if they never may, `OverloadError` if as many wait as may.
        """
        if self._most_waiting is not None:
            self._check(self._most_waiting, waiting, coming, field)
        self.entering += coming

    def _check(self, most_waiting: int, waiting: int, coming: int, field: str) -> None:
        if coming > self._places + most_waiting:
            raise RequestError(
                f"{field} asks for {coming} completions at once, {self._places} may run and "
                f"{most_waiting} wait (max_num_seqs, max_queue): send fewer at a time, or have the "
                "server started with a longer queue",
                field,
            )
        if waiting >= most_waiting:
            raise OverloadError(
                f"{waiting} completions wait, max_queue is {most_waiting}: try again later, or "
                "have the server started with a longer queue",
                self._retry_after_s(waiting),
            )

    def _retry_after_s(self, waiting: int) -> int:
        if not self._starts_s:
            return 1
        measured_s = self._clock_s() - self._starts_s[0]
        return min(_MOST_WAIT_S, max(1, math.ceil(waiting * measured_s / len(self._starts_s))))
