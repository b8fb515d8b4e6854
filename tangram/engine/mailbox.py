"""Jobs of other threads for the engine's thread, and the published length of the queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tangram.engine.intake import Intake
from tangram.errors import EngineError

Job = Callable[[], None]


class Mailbox:
    """Jobs for the engine's thread, and the bound of its queue. Any thread may call it.

    The lock is held only while jobs are added or taken, never while one runs. `places` are those of
    a batch, all free at first.
    """

    def __init__(self, intake: Intake, places: int) -> None:
        self._intake, self._excess = intake, -places
        self._jobs = deque[Job]()
        self._arrived = 0  # of `Intake.entering`, those that are already in the queue
        self._changed = threading.Condition()
        self._stopping = False
        self.closed = False

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """How many completions have no place in the batch."""
        return max(0, self._excess + self._intake.entering)

    @property
    def most_completions(self) -> int | None:
        """More completions than these may never enter together; None is no limit."""
        return self._intake.most

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if `submit` would for `coming` completions."""
        with self._changed:
            self._intake.check_queue(self.waiting, coming)

    def submit(self, jobs: list[Job], coming: int, field: str) -> None:
        """Add `jobs` that bring `coming` completions.

        Raises as `Intake.take` does, and `EngineError` once the engine has stopped.
        """
        with self._changed:
            if self.closed:
                raise EngineError("the engine has stopped: the log has the reason, start it again")
            self._intake.take(self.waiting, coming, field)
            self._leave(jobs)

    def post(self, job: Job) -> bool:
        """Add a job. Returns False if the mailbox is closed."""
        with self._changed:
            if not self.closed:
                self._leave([job])
            return not self.closed

    def take(self) -> Job | None:
        """The oldest job, None if there is none. If it fails, the other jobs stay here."""
        with self._changed:
            return self._jobs.popleft() if self._jobs else None

    def arrive(self, completions: int) -> None:
        """`completions` that were entering are in the queue.

        The next `publish` no longer counts them as entering.
        """
        self._arrived += completions

    def start(self) -> None:
        """Report that a completion has left the queue."""
        with self._changed:
            self._intake.count_start()

    def publish(self, excess: int) -> None:
        """Publish the queue's length: `excess` completions over the places there are."""
        with self._changed:
            self._excess = excess
            self._intake.entering -= self._arrived
            self._arrived = 0

    def wait(self) -> bool:
        """Wait for a job. Returns False if the engine must stop."""
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            return not self._stopping

    @property
    def stopping(self) -> bool:
        """Whether the engine must stop."""
        return self._stopping

    def stop(self) -> None:
        """Stop the engine after its current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Accept no more jobs; those left before can still be taken."""
        with self._changed:
            self.closed = True

    def _leave(self, jobs: list[Job]) -> None:
        self._jobs.extend(jobs)
        self._changed.notify()
