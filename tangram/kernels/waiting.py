"""How long idle OpenMP threads spin for the next piece of work: long on idle cores, briefly where
others want them.

A layer is some ten parallel regions of microseconds. To sleep and wake costs more than the wait, so
libgomp spins, for milliseconds. Beside another program that is the worst: threads that spin use up
their share of the core. The one with work to do then waits for the other program, in each region
anew.

libgomp spins 300 times more briefly while a process has more OpenMP threads than cores
(GOMP_SPINCOUNT in its manual). That is the only switch that works at run time and leaves the number
of threads alone, and with it each bit of a result.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")
WINDOW_S = 0.25
# Threads that waited for a core, in seconds for each second: above the first others want it, below
# the second nobody.
CROWDED, FREE = 0.10, 0.03
FREE_S = 1.0  # so long must nobody want the cores
_OWN_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Elements of which torch gives each thread a share.
_SHARED_ELEMENTS = 1 << 20


class WaitPolicy:
    """Lets threads wait briefly while the machine is crowded; does nothing where the user has
    chosen a policy.

    Call `adjust` between steps. `tasks` is where Linux tells of this process's threads; elsewhere
    nobody knows.
    """

    def __init__(
        self,
        tasks: Path = TASKS,
        clock_s: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._tasks, self._clock_s = tasks, clock_s
        self._chosen = any(name in environment for name in _OWN_CHOICE)
        self._since_s, self._waited = clock_s(), _read_waits_s(tasks)
        self._free_s = 0.0
        self._release: weakref.finalize[[], WaitPolicy] | None = None

    @property
    def brief(self) -> bool:
        """Whether threads wait briefly now."""
        return self._release is not None

    def adjust(self) -> None:
        """Look at the time since the last look, if it was long enough, and change how
        threads wait.
        """
        seconds = self._clock_s() - self._since_s
        if self._chosen or seconds < WINDOW_S:
            return
        before, self._waited = self._waited, _read_waits_s(self._tasks)
        share = sum(max(0.0, now - before.get(task, now)) for task, now in self._waited.items())
        share /= seconds
        self._since_s += seconds
        self._free_s = self._free_s + seconds if share < FREE else 0.0
        if self._release is None and share > CROWDED:
            self._release = weakref.finalize(self, _more_threads_than_cores())
        elif self._release is not None and self._free_s >= FREE_S:
            self._release()
            self._release = None


def _read_waits_s(tasks: Path) -> dict[str, float]:
    """Seconds that each thread has waited for a core since it began; nothing where that is not
    known.
    """
    waited = {}
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, IndexError, ValueError):  # it has just ended
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


def _more_threads_than_cores() -> Callable[[], None]:
    """Begin OpenMP teams that sleep, so that libgomp counts more threads than cores; returns what
    ends them.
    """
    threads, cores, done = torch.get_num_threads(), len(os.sched_getaffinity(0)), threading.Event()
    teams = max(1, -(-(cores - threads + 1) // (threads - 1))) if threads > 1 else 0

    def lead() -> None:
        torch.ones(_SHARED_ELEMENTS)
        done.wait()

    for _ in range(teams):
        threading.Thread(target=lead, name="tangram-team", daemon=True).start()
    return done.set
