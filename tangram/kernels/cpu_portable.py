"""The functions of `cpu_intrinsics.py` and `cpu_entries.py` in plain Numba, for arm64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tangram.kernels.cpu_widen import widen
from tangram.numba_cache import compile_kept

KEYS = 0  # scores that `dot_keys` may write behind the last one
FUSED = {"contract", "nsz"}


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


# A token drafted in front of others must get the bits that it gets alone. Its entries are the same,
# but more follow. So a sum over entries has one order, and what follows adds zeros at its end.


@compile_kept(fastmath={"reassoc", *FUSED, "arcp"})
def dot_keys(query, blocks, block, begin, end, scores, at, wide):  # type: ignore[no-untyped-def]
    """scores[m, at + i] = query[m] · key begin + i of `block`, before `end`.

    Four keys share each load of the query.
    """
    keys, head_dim = widen(blocks[block, 0], begin, end, wide), query.shape[1]
    for m in range(query.shape[0]):
        q = query[m]
        for t in range(begin, end, 4):
            t1, t2, t3 = min(t + 1, end - 1), min(t + 2, end - 1), min(t + 3, end - 1)
            k0, k1, k2, k3 = keys[t], keys[t1], keys[t2], keys[t3]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                s0 += q[d] * k0[d]
                s1 += q[d] * k1[d]
                s2 += q[d] * k2[d]
                s3 += q[d] * k3[d]
            i = at - begin
            scores[m, i + t], scores[m, i + t1] = s0, s1
            scores[m, i + t2], scores[m, i + t3] = s2, s3


@compile_kept(fastmath=FUSED)
def add_values(weights, at, blocks, block, begin, end, out, wide):  # type: ignore[no-untyped-def]
    """out[m] += Σ weights[m, at + i] · value begin + i of `block`, before `end`, one by one.

    Four values share each load and store of the output.
    """
    values = widen(blocks[block, blocks.shape[1] - 1], begin, end, wide)
    head_dim = out.shape[1]
    for m in range(out.shape[0]):
        o, w = out[m], weights[m]
        t = begin
        while t + 4 <= end:
            i = at + t - begin
            w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
            v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
            for d in range(head_dim):
                part = o[d]
                part += w0 * v0[d]
                part += w1 * v1[d]
                part += w2 * v2[d]
                part += w3 * v3[d]
                o[d] = part
            t += 4
        while t < end:
            w0, v0 = w[at + t - begin], values[t]
            for d in range(head_dim):
                o[d] += w0 * v0[d]
            t += 1
