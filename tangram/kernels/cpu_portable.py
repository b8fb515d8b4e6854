"""The functions of `cpu_intrinsics.py` in plain Numba, for arm64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tangram.numba_cache import compile_kept


@compile_kept()
def next_task(counters: Any, worker: int, workers: int) -> Any:
    """The next task of `worker`: every `workers`-th, from counters[worker] on."""
    task = counters[worker]
    counters[worker] += workers
    return task


@compile_kept(inline="always")
def larger(a: Any, b: Any) -> Any:
    """The larger of float32 a and b, none of them NaN."""
    return max(a, b)


@compile_kept(inline="always")
def power_of_two(n: Any) -> Any:
    """2 to the power of int32 n, -126 to 127, as float32."""
    return np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@compile_kept(inline="always")
def prefetch(array: Any, offset: int) -> None:
    """Does nothing: there is no portable prefetch."""
