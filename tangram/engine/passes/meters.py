"""Measurements of a serving engine: clocks, plans, and how well its budgets fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tangram.kernels.stopwatch import Stopwatch
from tangram.model.overflow import Overflow


@dataclass
class Meters:
    """Measurements since the start.

    `sealing` times scoring, selection and storing of chunks on the device. `overflow` is None
    unless configured. `step_s` are the seconds of the engine's steps. `device_s` are those in which
    the host waits for the device; on a CPU, those of the model's forward passes. The rest is the
    host's own work. `plans` counts decode plans by the kind of planner.
    """

    sealing: Stopwatch
    overflow: Overflow | None = None
    plans: Counter[str] = field(default_factory=Counter)
    step_s: float = 0.0
    device_s: float = 0.0
    _waited_s: float = 0.0

    def time(self, step: Callable[[], bool]) -> bool:
        """The result of `step`. Its time counts if that is true, so that it had something to do."""
        begin_s = time.perf_counter()
        worked = step()
        waited_s, self._waited_s = self._waited_s, 0.0
        if worked:  # both at once: a reader finds no more waiting than steps
            self.step_s += time.perf_counter() - begin_s
            self.device_s += waited_s
        return worked

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as the device's."""
        begin_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begin_s

    def collect(self) -> None:
        """Count what the device has finished by now, without waiting for it."""
        self.sealing.collect()
        if self.overflow is not None:
            self.overflow.collect()

    def clear(self) -> None:
        """Forget what was measured before serving began."""
        self.sealing.clear()
        if self.overflow is not None:
            self.overflow.clear()
        self.plans.clear()
        self.step_s = self.device_s = self._waited_s = 0.0
