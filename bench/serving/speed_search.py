"""The fastest speed at which a load is sustained: two speeds, brought together by trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

MOST_STEPS_OUT = 5  # doublings above the fastest speed that was asked for, or halvings below


class SpeedSearch:
    """Which speed to try next: first those of `speeds`, which ascend, until one fails.

    Without `within` that is all. With it, speeds are doubled until one fails, or halved until one
    holds, at most `MOST_STEPS_OUT` times. Then the geometric mean of `held` and `failed` is tried,
    until `failed` is at most `within` above `held`.

    Raises `ValueError` for speeds that do not ascend from above 0, or a `within` that is not above
    0.
    """

    def __init__(self, speeds: Sequence[float], within: float | None = None) -> None:
        ascending = all(slower < faster for slower, faster in pairwise(speeds))
        if not (speeds and speeds[0] > 0 and ascending and math.isfinite(speeds[-1])):
            raise ValueError(f"speeds are {list(speeds)}, they must ascend from above 0")
        if within is not None and not within > 0:
            raise ValueError(f"within is {within}, it must be greater than 0")
        self._given, self._within = list(speeds), within
        self.held: float | None = None
        self.failed: float | None = None

    def note(self, speed: float, held: bool) -> None:
        """Whether the load was sustained at `speed`, which `find_next` named."""
        if held:
            self.held = speed
        else:
            self.failed = speed

    def find_next(self) -> float | None:
        """The speed to try; None at the end."""
        held, failed, within = self.held, self.failed, self._within
        if failed is None:
            left = [speed for speed in self._given if held is None or speed > held]
            if left or held is None or within is None:
                return left[0] if left else None
            return 2 * held if held < self._given[-1] * 2**MOST_STEPS_OUT else None
        if within is None:
            return None
        if held is None:
            return failed / 2 if failed > self._given[0] / 2**MOST_STEPS_OUT else None
        return math.sqrt(held * failed) if failed > held * (1 + within) else None
