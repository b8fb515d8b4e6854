"""What other threads leave for whoever steps an engine, and the length of the queue that they are
told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tangram.engine.intake import Intake
from tangram.errors import EngineError

Job = Callable[[], None]


class Mailbox:
    """Jobs for the engine's thread, and the bound of its queue. Any thread may call; nobody waits
    long.

    The lock is held for as long as it takes to enter or to take out jobs, never while one is done.
    `places` are those of a batch, of which at first none is taken.
    """

    def __init__(self, intake: Intake, places: int) -> None:
        self._intake, self._excess = intake, -places
        self._jobs = deque[Job]()
        self._arrived = 0  # of `Intake.entering`, those that are in the queue by now
        self._changed = threading.Condition()
        self._stopping = False
        self.closed = False

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """How many completions there is no place for in the batch."""
        return max(0, self._excess + self._intake.entering)

    def submit(self, jobs: list[Job], coming: int, field: str) -> None:
        """Leave `jobs` that bring `coming` completions.

        Raises as `Intake.take` does, and `EngineError` once the engine has stopped.
        """
        with self._changed:
            if self.closed:
                raise EngineError("the engine has stopped: the log has the reason, start it again")
            self._intake.take(self.waiting, coming, field)
            self._leave(jobs)

    def post(self, job: Job) -> bool:
        """Leave a job; False once nobody takes any out."""
        with self._changed:
            if not self.closed:
                self._leave([job])
            return not self.closed

    def take(self) -> Job | None:
        """The job that came first, None if there is none; one that fails leaves the others here."""
        with self._changed:
            return self._jobs.popleft() if self._jobs else None

    def arrive(self, completions: int) -> None:
        """So many of those that were coming are in the queue, which `publish` tells next."""
        self._arrived += completions

    def start(self) -> None:
        """A completion has left the queue."""
        with self._changed:
            self._intake.count_start()

    def publish(self, excess: int) -> None:
        """Tell the queue's length: `excess` completions over the places there are."""
        with self._changed:
            self._excess = excess
            self._intake.entering -= self._arrived
            self._arrived = 0

    def wait(self) -> bool:
        """Until there is a job; False if the engine is to stop."""
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            return not self._stopping

    @property
    def stopping(self) -> bool:
        """Whether the engine is to stop."""
        return self._stopping

    def stop(self) -> None:
        """Have the engine stop after its current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Take in nothing any more; what was left before can still be taken out."""
        with self._changed:
            self.closed = True

    def _leave(self, jobs: list[Job]) -> None:
        self._jobs.extend(jobs)
        self._changed.notify()
