"""Shared by the tiled kernels: products, records, ranges of tasks, soft-capped scores (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from tangram.plan import records
from tangram.plan.records import RangeKind, list_words

_ABS = tl.constexpr(int(RangeKind.ABS))
OPEN = tl.constexpr(int(RangeKind.OPEN))
_FRAC = tl.constexpr(int(RangeKind.FRAC))
WINDOW = tl.constexpr(int(RangeKind.WINDOW))
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The words of each record, for `word` and `size`.
ADDRESS = tl.constexpr(" ".join(list_words(records.ADDRESS)))
TASK = tl.constexpr(" ".join(list_words(records.TASK)))
ENTRY = tl.constexpr(" ".join(list_words(records.ENTRY)))
SEGMENT = tl.constexpr(" ".join(list_words(records.SEGMENT)))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def word(record, name):
    """The place of the word `name` in a record."""
    return record.split().index(name)


@triton.constexpr_function
def size(record):
    """How many words a record has."""
    return len(record.split())


@triton.jit
def multiply(a, b, acc):
    """acc + a @ b, float32 sums; float32 operands are not rounded."""
    if INTERPRETED:  # the interpreter multiplies the bits of a bfloat16 as an integer
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def let_next_start():
    """Programmatic dependent launch: the next launch may begin once the device has capacity."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_tasks():
    """Wait until every launch before this one has written its results."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def resolve_range(kind, a, b, length_place, TILE: tl.constexpr):
    """Begin and end of a task's range: `plan.loops.resolve`, one task at a time."""
    begin = a
    end = b
    if kind != _ABS:  # an immutable span does not wait for its row's length
        length = tl.load(length_place)
        end = length
        begin = tl.minimum(a, length)
        if kind == WINDOW:
            begin = tl.maximum(length - a, 0)
        if kind == _FRAC:
            tiles = (length + TILE - 1) // TILE
            begin = tl.minimum(a * tiles // b * TILE, length)
            end = tl.minimum((a + 1) * tiles // b * TILE, length)
    return begin, end


@triton.jit
def take_part(acc, peak, total, lse, value):
    """Add a part, value [M, D] and log-sum-exp [M] (base 2), to the online softmax.

    An EMPTY part has weight 0.
    """
    new_peak = tl.maximum(peak, lse)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(lse - safe)
    shrink = tl.exp2(peak - safe)
    return (
        acc * shrink[:, None] + weight[:, None] * value.to(tl.float32),
        new_peak,
        total * shrink + weight,
    )


@triton.jit
def absorb_tile(softmax, scores, n, last, scaling, values, place, column, MASKED: tl.constexpr):
    """Add a tile to the online `softmax`: acc, peak and total.

    `scores` [M, N] are the products with the entries `n`; `last` [M] is the last of them that each
    query sees. The tile of `values` is at (place, column).
    """
    acc, peak, total = softmax
    if MASKED:
        scores = tl.where(n[None, :] > last[:, None], float("-inf"), scores)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * (scaling * LOG2E))
    weights = tl.exp2(scores * (scaling * LOG2E) - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    v = values.load([place, column])
    acc = multiply(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def soft_cap(scores, scaling, softcap):
    """c * tanh(s / c) of the scaled scores, times log2(e).

    An overflowing exponential gives the limits, -1 and 1.
    """
    grown = tl.exp2(scores * (scaling / softcap * 2.0 * LOG2E))
    return (1.0 - 2.0 / (1.0 + grown)) * (softcap * LOG2E)
