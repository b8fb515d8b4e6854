"""Batches with the lengths of PersistentKV's trace families, drawn by seed.

    bucketed     one row, up to a quarter shorter than its bucket of 8K, 16K, 32K or 64K
    homogeneous  every row 32K
    bimodal      one row of 48K-64K for every three of 2K-4K
    uniform      rows of 1K-64K, all lengths equally likely
    zipf         1K times a Zipf variate (exponent 1.5), at most 64K: few long rows among many

In a *living* trace rows of a family arrive at random, grow by a token a step, and leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tangram.errors import ConfigError

K = 1024
LONGEST = 64 * K
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Trace:
    """A family, its batch size and, for `bucketed`, the bucket in tokens."""

    family: str
    batch: int
    bucket: int = 32 * K

    @property
    def name(self) -> str:
        """Family, bucket where it has one, and batch size."""
        suffix = f" {self.bucket // K}K" if self.family in ("bucketed", "homogeneous") else ""
        return f"{self.family}{suffix} B{self.batch}"

    def lengths(self, seed: int) -> list[int]:
        """Tokens of each row. Raises `ConfigError` for an unknown family."""
        draw = np.random.default_rng((seed, self.batch, self.bucket))
        match self.family:
            case "bucketed":
                sizes = draw.integers(self.bucket * 3 // 4, self.bucket, self.batch, endpoint=True)
            case "homogeneous":
                sizes = np.full(self.batch, self.bucket)
            case "bimodal":
                short = draw.integers(2 * K, 4 * K, self.batch, endpoint=True)
                long = draw.integers(48 * K, LONGEST, self.batch, endpoint=True)
                sizes = np.where(np.arange(self.batch) % 4 == 0, long, short)
            case "uniform":
                sizes = draw.integers(K, LONGEST, self.batch, endpoint=True)
            case "zipf":
                sizes = np.minimum(K * draw.zipf(1.5, self.batch), LONGEST)
            case _:
                raise ConfigError(
                    f"trace family is {self.family!r}, known are {', '.join(FAMILIES)}"
                )
        return [int(size) for size in sizes]


FAMILIES = ("bucketed", "homogeneous", "bimodal", "uniform", "zipf")
TRACES = (
    *(Trace("bucketed", 1, size * K) for size in (8, 16, 32, 64)),
    *(Trace("homogeneous", batch) for batch in (1, 4, 8)),
    Trace("bimodal", 4),
    Trace("bimodal", 8),
    Trace("uniform", 8),
    Trace("zipf", 8),
)
QUICK_TRACES = (TRACES[0], TRACES[2], TRACES[6], TRACES[8], TRACES[10])


@dataclass(frozen=True)
class LivingTrace:
    """Rows of `trace` that arrive, grow and leave; on average there are as many as its batch.

    A row stays for `stay` steps on average (geometric), so `batch / stay` arrive in a step
    (Poisson).
    """

    trace: Trace
    stay: int = 256

    def batches(self, seed: int, steps: int) -> Iterator[tuple[bool, list[int]]]:
        """Of each step: whether rows came or went, and the lengths of all rows, at least one."""
        draw = np.random.default_rng((seed, self.trace.batch, self.stay))
        count, lengths = 0, list[int]()
        for _ in range(steps):
            stays = draw.random(len(lengths)) >= 1 / self.stay
            grown = [length + 1 for length, kept in zip(lengths, stays, strict=True) if kept]
            arriving = int(draw.poisson(self.trace.batch / self.stay))
            if not count:
                arriving = self.trace.batch
            elif not grown:
                arriving = max(1, arriving)
            came = self._arrive(count, arriving, seed)
            count += arriving
            changed = bool(came) or not stays.all()
            lengths = grown + came
            yield changed, lengths

    def _arrive(self, count: int, arriving: int, seed: int) -> list[int]:
        """The lengths of rows number `count` and following: those of one batch after the other."""
        size = self.trace.batch
        return [
            self.trace.lengths(seed + 1000 * (number // size))[number % size]
            for number in range(count, count + arriving)
        ]


LIVING_TRACES = tuple(
    LivingTrace(Trace(family, batch))
    for family, batch in (("homogeneous", 8), ("bimodal", 8), ("uniform", 8), ("zipf", 32))
)
