"""What an engine measures about itself while it serves: clocks, plans, and how well its budgets
fit.
"""

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
    """Since the start. `sealing` times scoring, selection and storing of chunks on the device;
    `overflow` is None unless somebody asked for it.

    `step_s` are the seconds of the engine's steps, and `device_s` those of them in which the host
    waits for the device, or, on a CPU, is the device: runs the model's forward passes. The rest is
    the host's own work. `plans` counts decode plans by the kind of planner.
    """

    sealing: Stopwatch
    overflow: Overflow | None = None
    plans: Counter[str] = field(default_factory=Counter)
    step_s: float = 0.0
    device_s: float = 0.0
    _waited_s: float = 0.0

    def time(self, step: Callable[[], bool]) -> bool:
        """What `step` returns, which counts if that is true: it had something to do."""
        begin_s = time.perf_counter()
        worked = step()
        waited_s, self._waited_s = self._waited_s, 0.0
        if worked:  # both at once: whoever reads finds no more waiting than steps
            self.step_s += time.perf_counter() - begin_s
            self.device_s += waited_s
        return worked

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is inside is the device's time."""
        begin_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begin_s

    def collect(self) -> None:
        """Enter what the device has finished by now; it is not waited for."""
        self.sealing.collect()
        if self.overflow is not None:
            self.overflow.collect()

    def clear(self) -> None:
        """Forget what was measured before anybody was served."""
        self.sealing.clear()
        if self.overflow is not None:
            self.overflow.clear()
        self.plans.clear()
        self.step_s = self.device_s = self._waited_s = 0.0
