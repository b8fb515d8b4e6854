"""Numba code of prefill.

A task is a span of the queries of one row for one KV head, for all of its G query heads. It reads
the entries of the past and of the row in blocks of `BLOCK`, and packs each for the products of
`products.py`. Then it takes the queries by tiles: scores, online softmax, values. So a result
depends on its own row alone, and on no thread.

Everything is computed in the dtype of the queries, and summed in float32. In bfloat16 weights are
rounded before they multiply the values, as torch does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange, types
from numba.extending import overload

from tangram.kernels.cpu.decode_loops import FAST, cap, exp_negative, largest
from tangram.kernels.cpu.entry_products import widen
from tangram.kernels.cpu.intrinsics import next_task
from tangram.kernels.cpu.products import (
    TILE_ROWS,
    TILE_VECTORS,
    multiply_column,
    multiply_tile,
    to_bfloat16,
)
from tangram.kernels.cpu.vectors import LANES
from tangram.numba_cache import compile_kept
from tangram.types import Int64

BLOCK = 512  # entries
TASK_QUERIES = 384  # a query of each of the G heads counts
NOTICE = "compiling the CPU kernel of prefill, once on this machine: takes about 10 s"
Array = npt.NDArray[Any]


class Asked(NamedTuple):
    """What attends, and where rows and their pasts lie.

    `q` [H, T * G + TILE_ROWS, D] are the queries of a KV head, token by token, and what is behind
    them takes any value. `out` is like q. `k` and `v` are [T', H, D]. `spans` [N, 5] and `address`
    [N, H, 3] are those of `PrefillRows`.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    spans: Array
    address: Array


class Scoring(NamedTuple):
    """How scores become weights; `window` and `softcap` are 0 and `sinks` [H, G] −∞ for none."""

    window: int
    scaling: np.float32
    softcap: np.float32
    sinks: Array


class Scratch(NamedTuple):
    """Memory of W workers. E are elements of a 32-bit word, M the queries of a task.

    `entries` [W, 2, BLOCK, D] are keys and values, `weights` [W, TILE_ROWS, BLOCK], in the dtype of
    the queries. `keys` [W, D / E, BLOCK] and `values` [W, BLOCK / E, V] are words for products.
    Float32 are `scores` [W, TILE_ROWS, BLOCK], `wide` [W, P, D], `sums` [W, M, V] and `state`
    [W, M, 2], running maximum and sum. V is D, rounded up to whole vectors.
    """

    entries: Array
    weights: Array
    keys: Array
    values: Array
    scores: Array
    wide: Array
    sums: Array
    state: Array


def scratch(workers: int, page_tokens: int, q: Array, group: int) -> Scratch:
    """Memory for the tasks of queries q [..., D]."""
    word = np.dtype(np.float32 if q.dtype == np.float32 else np.uint32)
    dim, per_word = q.shape[-1], word.itemsize // q.itemsize
    width = -(-dim // LANES) * LANES
    most = -(-task_tokens(group) * group // TILE_ROWS) * TILE_ROWS
    return Scratch(
        np.empty((workers, 2, BLOCK, dim), q.dtype),
        np.empty((workers, TILE_ROWS, BLOCK), q.dtype),
        np.empty((workers, dim // per_word, BLOCK), word),
        np.zeros((workers, BLOCK // per_word, width), word),
        np.empty((workers, TILE_ROWS, BLOCK), np.float32),
        np.empty((workers, page_tokens, dim), np.float32),
        np.empty((workers, most, width), np.float32),
        np.empty((workers, most, 2), np.float32),
    )


def task_tokens(group: int) -> int:
    """The tokens of a task."""
    return max(1, TASK_QUERIES // group)


def split_rows(spans: Array, heads: int, group: int) -> Int64:
    """Tasks [N, 4] of rows with `spans`: row, head, first and last token; the longest come first.

    The split of a row depends on nothing but its queries.
    """
    tokens = task_tokens(group)
    counts = (spans[:, 1] - spans[:, 0]).tolist()
    tasks = [
        (row, head, first, min(first + tokens, count))
        for row, count in reversed(list(enumerate(counts)))
        for first in reversed(range(0, count, tokens))
        for head in range(heads)
    ]
    return np.array(tasks, np.int64).reshape(-1, 4)


def as_element(x: Any, like: Any) -> Any:
    """x, float32 or an element of an array like `like`, as such an element."""
    return x if x.dtype == like.dtype else to_bfloat16(x)  # type: ignore[call-arg]


@overload(as_element, inline="always")
def _compile_as_element(x, like):  # type: ignore[no-untyped-def]
    if x == like.dtype:
        return lambda x, like: x
    return lambda x, like: to_bfloat16(x)  # type: ignore[call-arg]


def as_readable(
    blocks: Any, block: int, part: int, begin: int, end: int, wide: Any, like: Any
) -> Any:
    """Vectors [begin, end) of a block, of which `as_element` makes those of `like`."""
    raise NotImplementedError("compiled code alone calls it")


@overload(as_readable)
def _compile_as_readable(blocks, block, part, begin, end, wide, like):  # type: ignore[no-untyped-def]
    if blocks.dtype == like.dtype:
        return lambda blocks, block, part, begin, end, wide, like: blocks[block, part]

    def read(blocks, block, part, begin, end, wide, like):  # type: ignore[no-untyped-def]
        widen(blocks, block, part, begin, end, wide)
        return wide

    return read


def per_word(entries: Any) -> int:
    """How many elements of `entries` a 32-bit word holds."""
    return 4 // int(entries.itemsize)


@overload(per_word, inline="always")
def _compile_per_word(entries):  # type: ignore[no-untyped-def]
    return (lambda entries: 1) if entries.dtype == types.float32 else (lambda entries: 2)


def join(first: Any, last: Any) -> Any:
    """The word of bfloat16 `first` and `last`; of float32 `first`, which fills a word."""
    return (
        first if first.dtype == np.float32 else np.uint32(first) | np.uint32(last) << np.uint32(16)
    )


@overload(join, inline="always")
def _compile_join(first, last):  # type: ignore[no-untyped-def]
    if first == types.float32:
        return lambda first, last: first
    return lambda first, last: np.uint32(first) | np.uint32(last) << np.uint32(16)


@compile_kept()
def pack(entries, count, keys, values):  # type: ignore[no-untyped-def]
    """Write the first `count` `entries` [2, BLOCK, D], a multiple of LANES, as words for products.

    A word holds a float32, or two bfloat16: of a key neighbours, of values those of two entries.
    """
    size = per_word(entries)
    behind = size - 1
    for t in range(0, count, LANES):
        for d in range(keys.shape[0]):
            for i in range(LANES):
                entry, at = t + i, size * d
                keys[d, entry] = join(entries[0, entry, at], entries[0, entry, at + behind])
    for t in range(count // size):
        for d in range(entries.shape[2]):
            values[t, d] = join(entries[1, size * t, d], entries[1, size * t + behind, d])


@compile_kept(inline="always")
def multiply(a, row, steps, b, c, place, columns, adds):  # type: ignore[no-untyped-def]
    """c[place + i] = a[row + i] · b for TILE_ROWS rows and `columns`, a multiple of LANES.

    The product has `steps` words. It is added to c if `adds`.
    """
    column = 0
    while column + TILE_VECTORS * LANES <= columns:
        multiply_tile(a, row, steps, b, c, place, column, adds)
        column += TILE_VECTORS * LANES
    while column < columns:
        multiply_column(a, row, steps, b, c, place, column, adds)
        column += LANES


@compile_kept(inline="always")
def read_block(asked, pages, row, head, begin, past, start, stop, work, worker):  # type: ignore[no-untyped-def]
    """Read and pack entries [start, stop) of a head: `past` ones from `begin` on, then its own.

    Returns their count, rounded up to a multiple of LANES.
    """
    page_tokens, blocks, entries = pages.blocks.shape[2], pages.blocks, work.entries[worker]
    entry, last_past = start, min(stop, past)
    while entry < last_past:
        place = (begin + entry) % page_tokens
        page = pages.tables[asked.address[row, head, 0] + (begin + entry) // page_tokens]
        block = page * pages.heads_per_page + asked.address[row, head, 1]
        last = min(page_tokens, place + last_past - entry)
        for vector in range(2):
            held = as_readable(blocks, block, vector, place, last, work.wide[worker], entries)
            for t in range(place, last):
                for d in range(entries.shape[2]):
                    entries[vector, entry - start + t - place, d] = as_element(held[t, d], entries)
        entry += last - place
    behind = asked.spans[row, 2] - past
    columns = (stop - start + LANES - 1) // LANES * LANES
    for t in range(entry - start, columns):
        at = behind + start + t
        for d in range(entries.shape[2]):
            entries[0, t, d] = asked.k[at, head, d] if t < stop - start else 0
            entries[1, t, d] = asked.v[at, head, d] if t < stop - start else 0
    pack(entries, columns, work.keys[worker], work.values[worker])
    return columns


@compile_kept(inline="always")
def weigh(s, weights, columns, scaling, sums, state):  # type: ignore[no-untyped-def]
    """Turn the scores s[:columns] of a query into `weights`.

    Updates its `state`, and rescales its `sums` where the maximum rises.
    """
    top = max(state[0], scaling * largest(s, columns))
    if top > state[0]:
        shrink = exp_negative(state[0] - top)
        state[0], state[1] = top, state[1] * shrink
        for d in range(len(sums)):
            sums[d] *= shrink
    if top == -np.inf:  # nothing is visible yet
        top = np.float32(0.0)
    part = np.float32(0.0)
    for i in range(columns):
        weight = exp_negative(s[i] * scaling - top)
        part += weight
        weights[i] = as_element(weight, weights)
    state[1] += part


@compile_kept(fastmath=FAST)
def attend_tile(q, r, newest, group, columns, scoring, work, worker, at):  # type: ignore[no-untyped-def]
    """Add `columns` entries to the sums of a tile of queries, q[r] and following.

    They are queries `at` and following of their task. Its first token sees entries up to `newest`.
    """
    scores, weights, window = work.scores[worker], work.weights[worker], scoring.window
    multiply(q, r, work.keys.shape[1], work.keys[worker], scores, 0, columns, False)
    scaling = scoring.scaling
    if scoring.softcap > 0:
        for m in range(TILE_ROWS):
            for i in range(columns):
                scores[m, i] *= scaling
        cap(scores, columns, scoring.softcap)
        scaling = np.float32(1.0)
    for m in range(TILE_ROWS):
        seen = newest + (at + m) // group
        for i in range(max(0, seen + 1), columns):
            scores[m, i] = -np.inf
        if window > 0:
            for i in range(min(columns, seen + 1 - window)):
                scores[m, i] = -np.inf
        sums, state = work.sums[worker, at + m], work.state[worker, at + m]
        weigh(scores[m], weights[m], columns, scaling, sums, state)
    steps, width = columns // per_word(weights), work.sums.shape[2]
    multiply(weights, 0, steps, work.values[worker], work.sums[worker], at, width, True)


@compile_kept()
def attend_tasks(asked, pages, scoring, tasks, work, counter, worker):  # type: ignore[no-untyped-def]
    """The loop of one thread: take the next task until none is left."""
    group, window = scoring.sinks.shape[1], scoring.window
    while True:
        number = next_task(counter)  # type: ignore[call-arg,var-annotated]
        if number >= len(tasks):
            break
        row, head, first, last = tasks[number]
        begin_query, end_query, first_key, last_key, position = asked.spans[row]
        begin = max(0, position - window + 1) if window > 0 else 0
        past = asked.address[row, head, 2] - begin
        at, count = (begin_query + first) * group, (last - first) * group
        for r in range(work.sums.shape[1]):
            work.state[worker, r, 0], work.state[worker, r, 1] = -np.inf, 0.0
            for d in range(work.sums.shape[2]):
                work.sums[worker, r, d] = 0.0
        # Queries belong to the last keys.
        newest = past + last_key - first_key - (end_query - begin_query) + first
        end = newest + last - first
        oldest = max(0, newest + 1 - window) if window > 0 else 0
        for start in range(oldest // BLOCK * BLOCK, end, BLOCK):
            stop = min(start + BLOCK, end)
            columns = read_block(asked, pages, row, head, begin, past, start, stop, work, worker)
            for r in range(0, count, TILE_ROWS):
                seen = newest + min(r + TILE_ROWS - 1, count - 1) // group
                if seen < start or (window > 0 and newest + r // group + 1 - window >= stop):
                    continue
                visible = min(columns, (seen - start) // LANES * LANES + LANES)
                attend_tile(
                    asked.q[head], at + r, newest - start, group, visible, scoring, work, worker, r
                )
        for r in range(count):
            maximum, total = work.state[worker, r]
            total += np.exp(scoring.sinks[head, r % group] - maximum)
            out = asked.out[head, at + r]
            for d in range(len(out)):
                out[d] = as_element(work.sums[worker, r, d] / total, out)


@compile_kept(parallel=True, notice=NOTICE)
def attend(asked, pages, scoring, tasks, work, counter, workers):  # type: ignore[no-untyped-def]
    """Run all `tasks`: attention of `asked` over their pasts and, causally, themselves."""
    for worker in prange(workers):
        attend_tasks(asked, pages, scoring, tasks, work, counter, worker)
