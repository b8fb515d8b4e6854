"""The cost of tasks on one GPU and geometry, linear in the entries that they read.

A measured form of PAT's profit model. A task that reads n entries for m query-head rows takes the
larger of its transfer and its arithmetic time of the whole device. It also takes a fixed time of
the one worker that runs it. Every partial result is written once and read once. It counts as
float32 whatever its dtype; a measured rate absorbs the difference.

Worked example, the defaults (one H200, D 128, 16 bits): an entry is 2 · 128 · 2 = 512 bytes, 0.12
ns of the device. This is its cost for up to 64 rows. For 128 rows an entry takes 65,536 operations,
0.16 ns, so there arithmetic decides. A partial result of G = 4 heads is 4 · 129 · 4 bytes, written
and read: 0.97 ns, as much as 8 entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Float64, Int64


@dataclass(frozen=True)
class CostModel:
    """Constants of one device and geometry. Rates are those of the device with all workers busy.

    `bytes_per_us`: K and V read. `partial_bytes_per_us`: partial results written and read.
    `flops_per_us`: the products with K and V. `task_us`: the time a worker spends to start and end
    a task. `workers`: the number that run at once. `head_dim` is D, `element_bytes` the size of a K
    or V element, half as much where an entry is one vector. `tile_rows`: a task computes with its
    query-head rows rounded up to a multiple of this. Raises `ConfigError` naming a field that is
    not positive.
    """

    bytes_per_us: float = 4.24e6
    partial_bytes_per_us: float = 4.24e6
    flops_per_us: float = 4.0e8
    task_us: float = 0.5
    workers: int = 264
    head_dim: int = 128
    element_bytes: float = 2
    tile_rows: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"cost model: {name} is {value}, it must be greater than 0")

    @property
    def start_us(self) -> float:
        """The share of the device that one more task takes."""
        return self.task_us / self.workers

    def partial_us(self, group: int) -> float:
        """One partial result of `group` (G) query heads: output and log-sum-exp, written and read.

        Both are float32.
        """
        return 2 * 4 * (self.head_dim + 1) * group / self.partial_bytes_per_us

    def token_us(self, query_rows: Int64) -> Float64:
        """One entry, K and V, read for `query_rows` (rows · G) by one task; any shape."""
        padded = -(-np.asarray(query_rows) // self.tile_rows) * self.tile_rows
        arithmetic = 4 * self.head_dim / self.flops_per_us * padded
        return np.asarray(
            np.maximum(2 * self.head_dim * self.element_bytes / self.bytes_per_us, arithmetic)
        )
