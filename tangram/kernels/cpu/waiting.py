"""How long idle OpenMP threads spin: long on idle cores, briefly on busy ones.

A layer has some ten parallel regions of microseconds. Sleeping and waking costs more than the wait,
so libgomp spins for milliseconds. Beside another program this is harmful: threads that spin use up
their share of the core. The thread with work then waits for the other program in each region.

libgomp spins 300 times more briefly while a process has more OpenMP threads than cores
(GOMP_SPINCOUNT in its manual). No other switch works at run time without changing the number of
threads, and with it the bits of a result.
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
# Seconds that threads waited for a core, per second: above the first other programs want it, below
# the second none do.
CROWDED, FREE = 0.10, 0.03
FREE_S = 1.0  # the cores must be free for so long
_OWN_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Elements of which torch gives each thread a share.
_SHARED_ELEMENTS = 1 << 20


class WaitPolicy:
    """Lets threads wait briefly while the machine is busy.

    Does nothing if the user has chosen a policy. Call `adjust` between steps. `tasks` is the folder
    where Linux describes this process's threads; elsewhere it is missing.
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

    def adjust(self) -> None:
        """Update how threads wait, if the last update is long enough ago."""
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
    """Seconds that each thread has waited for a core since it began; empty if unknown."""
    waited = {}
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, IndexError, ValueError):  # it has just ended
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


def _more_threads_than_cores() -> Callable[[], None]:
    """Begin OpenMP teams that sleep, so that libgomp counts more threads than cores.

    Returns a function that ends them.
    """
    threads, cores, done = torch.get_num_threads(), len(os.sched_getaffinity(0)), threading.Event()
    teams = max(1, -(-(cores - threads + 1) // (threads - 1))) if threads > 1 else 0

    def lead() -> None:
        torch.ones(_SHARED_ELEMENTS)
        done.wait()

    for _ in range(teams):
        threading.Thread(target=lead, name="tangram-team", daemon=True).start()
    return done.set
