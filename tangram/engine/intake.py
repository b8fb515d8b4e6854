"""The bound of the queue, and how long a refused client should wait."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from tangram.errors import OverloadError, RequestError

_MEASURED_STARTS = 64
_MOST_WAIT_S = 60


class Intake:
    """Limits the queue to `most_waiting` completions; None is no limit. One thread at a time.

    While fewer wait, a request is accepted with all its completions. A request with more
    completions than `most_waiting` and the `places` of the batch together is always refused.
    `entering` counts the accepted completions that are not yet in the queue.

    If `r` completions leave the queue a second and `w` wait, the queue is empty in `w / r` seconds.
    A refused client gets this time, at least 1 s. It is at most a minute, because others may have
    given up by then.
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
        self.check_queue(waiting, coming)
        if self.most is not None and coming > self.most:
            raise RequestError(
                f"{field} asks for {coming} completions at once, {self._places} may run and "
                f"{self._most_waiting} wait (max_num_seqs, max_queue): send fewer at a time, or "
                "have the server started with a longer queue",
                field,
            )
        self.entering += coming

    def check_queue(self, waiting: int, coming: int) -> None:
        """Raise `OverloadError` if as many wait as may, unless `coming` completions never may."""
        most_waiting = self._most_waiting
        is_full = most_waiting is not None and waiting >= most_waiting
        if is_full and (self.most is None or coming <= self.most):
            raise OverloadError(
                f"{waiting} completions wait, max_queue is {most_waiting}: try again later, or "
                "have the server started with a longer queue",
                self._retry_after_s(waiting),
            )

    @property
    def most(self) -> int | None:
        """More completions than these may never enter together; None is no limit."""
        return None if self._most_waiting is None else self._places + self._most_waiting

    def _retry_after_s(self, waiting: int) -> int:
        if not self._starts_s:
            return 1
        measured_s = self._clock_s() - self._starts_s[0]
        return min(_MOST_WAIT_S, max(1, math.ceil(waiting * measured_s / len(self._starts_s))))
