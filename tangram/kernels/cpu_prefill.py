"""Numba code of the CPU prefill kernel, called by `cpu.py`.

A task is a span of the queries of one row for one KV head, for all of its G query heads. It reads
the entries of the past and of the row in blocks of `BLOCK`, and packs each for the products of
`cpu_products.py`. Then it takes the queries by tiles: scores, online softmax, values. So a result
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

from tangram.kernels.cpu_products import (
    LANES,
    TILE_ROWS,
    multiply_four,
    multiply_one,
    to_bfloat16,
)
from tangram.kernels.cpu_tasks import FAST, cap, exp_negative, largest, next_task, widen
from tangram.kernels.numba_cache import compile_kept
from tangram.types import Int64

BLOCK = 512  # entries
TASK_QUERIES = 384  # a query of each of the G heads counts
NOTICE = "compiling the CPU kernel of prefill, once on this machine: takes about 10 s"
Array = npt.NDArray[Any]


class Asked(NamedTuple):
    """What attends: q, out [T, Q, D], k and v [T', H, D], and where rows and their pasts lie.

    `spans` [N, 5] and `address` [N, H, 3] are those of `PrefillRows`.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    spans: Array
    address: Array


class Pages(NamedTuple):
    """The pool as virtual blocks [N_pages * Hp, 2, P, D], and its tables."""

    blocks: Array
    heads_per_page: int
    tables: Array


class Scoring(NamedTuple):
    """How scores become weights; `window` and `softcap` are 0, `sinks` [Q] −∞ where there are none."""

    window: int
    scaling: np.float32
    softcap: np.float32
    sinks: Array


class Scratch(NamedTuple):
    """Memory of W workers. E are elements of a 32-bit word, M the queries of a task.

    `query` [W, M, D], `keys` and `values` [W, BLOCK, D], `weights` [W, TILE_ROWS, BLOCK] have the
    dtype of the queries. `key_words` [W, BLOCK, D / E] are the words of `keys`. `packed_keys`
    [W, D / E, BLOCK] and `packed_values` [W, BLOCK / E, V] are words, too. Float32 are `scores`
    [W, TILE_ROWS, BLOCK], `wide` [W, P, D], `sums` [W, M, V], `maximum` and `total` [W, M]. V is D,
    rounded up to whole vectors.
    """

    query: Array
    keys: Array
    key_words: Array
    values: Array
    packed_keys: Array
    packed_values: Array
    scores: Array
    weights: Array
    wide: Array
    sums: Array
    maximum: Array
    total: Array


def scratch(workers: int, queries: int, page_tokens: int, q: Array) -> Scratch:
    """Memory for tasks of up to `queries` queries like q [T, Q, D]."""
    word = np.dtype(np.float32 if q.dtype == np.float32 else np.uint32)
    dim, per_word = q.shape[2], word.itemsize // q.itemsize
    width, most = -(-dim // LANES) * LANES, -(-queries // TILE_ROWS) * TILE_ROWS
    keys = np.empty((workers, BLOCK, dim), q.dtype)
    return Scratch(
        np.empty((workers, most, dim), q.dtype),
        keys,
        keys.view(word),
        np.empty((workers, BLOCK, dim), q.dtype),
        np.empty((workers, dim // per_word, BLOCK), word),
        np.zeros((workers, BLOCK // per_word, width), word),
        np.empty((workers, TILE_ROWS, BLOCK), np.float32),
        np.empty((workers, TILE_ROWS, BLOCK), q.dtype),
        np.empty((workers, page_tokens, dim), np.float32),
        np.empty((workers, most, width), np.float32),
        np.empty((workers, most), np.float32),
        np.empty((workers, most), np.float32),
    )


def split_rows(spans: Array, heads: int, group: int) -> Int64:
    """Tasks [N, 4] of rows with `spans`: row, head, first and last query; the longest come first.

    The split of a row depends on nothing but its queries.
    """
    queries = max(1, TASK_QUERIES // group)
    counts = (spans[:, 1] - spans[:, 0]).tolist()
    tasks = [
        (row, head, first, min(first + queries, count))
        for row, count in reversed(list(enumerate(counts)))
        for first in reversed(range(0, count, queries))
        for head in range(heads)
    ]
    return np.array(tasks, np.int64).reshape(-1, 4)


def as_element(x: Any, like: Any) -> Any:
    """Float32 x as an element of array `like`: itself, or the bits of bfloat16."""
    return x if like.dtype == np.float32 else to_bfloat16(x)


@overload(as_element, inline="always")
def _compile_as_element(x, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.float32:
        return lambda x, like: x
    return lambda x, like: to_bfloat16(x)


def as_row(block: Any, begin: int, end: int, wide: Any, out: Any) -> Any:
    """Entries [begin, end) of `block` [P, D], in a form that `as_element` or a copy takes."""
    return block if block.dtype == out.dtype else widen(block, begin, end, wide)


def copy_entries(block: Any, begin: int, end: int, wide: Any, out: Any, at: int) -> None:
    """out[at + i] = block[begin + i] for entries [begin, end), in the dtype of `out`.

    Where it differs from that of `block`, they pass through `wide` [P, D], float32.
    """


@overload(copy_entries)
def _compile_copy_entries(block, begin, end, wide, out, at):  # type: ignore[no-untyped-def]
    if block.dtype == out.dtype:

        def copy(block, begin, end, wide, out, at):  # type: ignore[no-untyped-def]
            for t in range(begin, end):
                for d in range(block.shape[1]):
                    out[at + t - begin, d] = block[t, d]

        return copy

    def convert(block, begin, end, wide, out, at):  # type: ignore[no-untyped-def]
        found = widen(block, begin, end, wide)
        for t in range(begin, end):
            for d in range(block.shape[1]):
                out[at + t - begin, d] = as_element(found[t, d], out)

    return convert


def pack_values(values: Any, count: int, packed: Any) -> None:
    """The first `count` values [BLOCK, D] as words: those of bfloat16 in pairs of entries."""


@overload(pack_values)
def _compile_pack_values(values, count, packed):  # type: ignore[no-untyped-def]
    if values.dtype == types.float32:

        def copy_values(values, count, packed):  # type: ignore[no-untyped-def]
            for t in range(count):
                for d in range(values.shape[1]):
                    packed[t, d] = values[t, d]

        return copy_values

    def pair_values(values, count, packed):  # type: ignore[no-untyped-def]
        for t in range(count // 2):
            for d in range(values.shape[1]):
                low, high = np.uint32(values[2 * t, d]), np.uint32(values[2 * t + 1, d])
                packed[t, d] = low | high << np.uint32(16)

    return pair_values


@compile_kept()
def pack_keys(words, count, packed):  # type: ignore[no-untyped-def]
    """packed[d, t] = words[t, d] for the first `count` entries, a multiple of LANES."""
    for t in range(0, count, LANES):
        for d in range(words.shape[1]):
            for i in range(LANES):
                packed[d, t + i] = words[t + i, d]


@compile_kept()
def multiply(a, row, steps, b, c, place, columns, adds):  # type: ignore[no-untyped-def]
    """c[place + i] = a[row + i] · b for TILE_ROWS rows and `columns`, a multiple of LANES.

    The product has `steps` words. It is added to c if `adds`.
    """
    column = 0
    while column + 4 * LANES <= columns:
        multiply_four(a, row, steps, b, c, place, column, adds)
        column += 4 * LANES
    while column < columns:
        multiply_one(a, row, steps, b, c, place, column, adds)
        column += LANES


@compile_kept(fastmath=FAST)
def weigh(scores, m, columns, scaling, work, worker, r):  # type: ignore[no-untyped-def]
    """Turn scores[m, :columns] into weights of query r.

    Updates its running maximum and sum, and rescales its sums where the maximum rises.
    """
    maximum, total, weights = work.maximum[worker], work.total[worker], work.weights[worker, m]
    s = scores[m]
    top = max(maximum[r], scaling * largest(s, columns))
    if top == -np.inf:  # nothing is visible yet
        for i in range(columns):
            weights[i] = as_element(np.float32(0.0), weights)
        return
    if top > maximum[r]:
        shrink = exp_negative(maximum[r] - top)
        total[r] *= shrink
        for d in range(work.sums.shape[2]):
            work.sums[worker, r, d] *= shrink
        maximum[r] = top
    part = np.float32(0.0)
    for i in range(columns):
        weight = exp_negative(s[i] * scaling - top)
        part += weight
        weights[i] = as_element(weight, weights)
    total[r] += part


@compile_kept()
def read_block(asked, pages, row, head, begin, past, start, stop, work, worker):  # type: ignore[no-untyped-def]
    """Read and pack entries [start, stop) of a head: `past` ones from `begin` on, then its own."""
    page_tokens, blocks = pages.blocks.shape[2], pages.blocks
    table, column = asked.address[row, head, 0], asked.address[row, head, 1]
    keys, values = work.keys[worker], work.values[worker]
    entry = start
    while entry < min(stop, past):
        place = (begin + entry) % page_tokens
        page = pages.tables[table + (begin + entry) // page_tokens]
        block = page * pages.heads_per_page + column
        last = min(page_tokens, place + min(stop, past) - entry)
        copy_entries(blocks[block, 0], place, last, work.wide[worker], keys, entry - start)
        copy_entries(blocks[block, 1], place, last, work.wide[worker], values, entry - start)
        entry += last - place
    own = asked.spans[row, 2] - past
    for t in range(entry, stop):
        for d in range(keys.shape[1]):
            keys[t - start, d] = asked.k[own + t, head, d]
            values[t - start, d] = asked.v[own + t, head, d]
    columns = (stop - start + LANES - 1) // LANES * LANES
    for t in range(stop - start, columns):
        for d in range(keys.shape[1]):
            keys[t, d] = 0
            values[t, d] = 0
    pack_keys(work.key_words[worker], columns, work.packed_keys[worker])
    pack_values(values, columns, work.packed_values[worker])
    return columns


@compile_kept()
def read_queries(asked, row, head, first, last, work, worker):  # type: ignore[no-untyped-def]
    """Begin a task: its queries, token by token, filled up with zeros to whole tiles."""
    query, dim = work.query[worker], asked.q.shape[2]
    group = asked.q.shape[1] // asked.k.shape[1]
    count = (last - first) * group
    rows = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for r in range(rows):
        work.maximum[worker, r], work.total[worker, r] = -np.inf, 0.0
        for d in range(work.sums.shape[2]):
            work.sums[worker, r, d] = 0.0
        token, h = asked.spans[row, 0] + first + r // group, head * group + r % group
        for d in range(dim):
            query[r, d] = asked.q[token, h, d] if r < count else 0
    return count


@compile_kept()
def hide(scores, m, columns, oldest, newest):  # type: ignore[no-untyped-def]
    """scores[m] = −∞ outside of [oldest, newest]."""
    for i in range(max(0, newest + 1), columns):
        scores[m, i] = -np.inf
    for i in range(min(columns, oldest)):
        scores[m, i] = -np.inf


@compile_kept()
def attend_tile(r, newest, start, columns, scoring, group, work, worker):  # type: ignore[no-untyped-def]
    """Add entries [start, start + columns) to the sums of the tile of queries from r on.

    Entry `newest` is the newest one that the task's first token sees.
    """
    scores, words = work.scores[worker], work.packed_keys.shape[1]
    multiply(work.query[worker], r, words, work.packed_keys[worker], scores, 0, columns, False)
    scaling = scoring.scaling
    if scoring.softcap > 0:
        for m in range(TILE_ROWS):
            for i in range(columns):
                scores[m, i] *= scaling
        cap(scores, columns, scoring.softcap)
        scaling = np.float32(1.0)
    for m in range(TILE_ROWS):
        seen = newest + (r + m) // group - start
        hide(scores, m, columns, seen + 1 - scoring.window if scoring.window > 0 else 0, seen)
        weigh(scores, m, columns, scaling, work, worker, r + m)
    steps = columns * work.packed_values.shape[1] // work.keys.shape[1]
    width = work.sums.shape[2]
    multiply(
        work.weights[worker], 0, steps, work.packed_values[worker], work.sums[worker], r, width, True
    )


@compile_kept()
def write_queries(asked, row, head, first, count, scoring, work, worker):  # type: ignore[no-untyped-def]
    """Write the results of a task."""
    group = asked.q.shape[1] // asked.k.shape[1]
    for r in range(count):
        h = head * group + r % group
        out = asked.out[asked.spans[row, 0] + first + r // group, h]
        total = work.total[worker, r] + np.exp(scoring.sinks[h] - work.maximum[worker, r])
        for d in range(len(out)):
            out[d] = as_element(work.sums[worker, r, d] / total, out)


@compile_kept()
def attend_rows(asked, pages, scoring, task, work, worker):  # type: ignore[no-untyped-def]
    """Run one task."""
    row, head, first, last = task[0], task[1], task[2], task[3]
    begin_query, end_query, first_key, last_key, position = asked.spans[row]
    group = asked.q.shape[1] // asked.k.shape[1]
    begin = max(0, position - scoring.window + 1) if scoring.window > 0 else 0
    past = asked.address[row, head, 2] - begin
    count = read_queries(asked, row, head, first, last, work, worker)
    # Queries belong to the last keys.
    newest = past + last_key - first_key - (end_query - begin_query) + first
    end = newest + last - first
    oldest = max(0, newest + 1 - scoring.window) if scoring.window > 0 else 0
    for start in range(oldest // BLOCK * BLOCK, end, BLOCK):
        stop = min(start + BLOCK, end)
        columns = read_block(asked, pages, row, head, begin, past, start, stop, work, worker)
        for r in range(0, count, TILE_ROWS):
            seen = newest + min(r + TILE_ROWS - 1, count - 1) // group
            if seen < start:
                continue
            if scoring.window > 0 and newest + r // group + 1 - scoring.window >= stop:
                continue
            visible = min(columns, (seen - start) // LANES * LANES + LANES)
            attend_tile(r, newest, start, visible, scoring, group, work, worker)
    write_queries(asked, row, head, first, count, scoring, work, worker)


@compile_kept()
def _take_tasks(asked, pages, scoring, tasks, work, counters, worker, workers):  # type: ignore[no-untyped-def]
    """The loop of one thread: take the next task until none is left."""
    while True:
        number = next_task(counters, worker, workers)  # type: ignore[call-arg,var-annotated]
        if number >= len(tasks):
            break
        attend_rows(asked, pages, scoring, tasks[number], work, worker)


@compile_kept(parallel=True, notice=NOTICE)
def attend(asked, pages, scoring, tasks, work, counters, workers):  # type: ignore[no-untyped-def]
    """Run all `tasks`: attention of `asked` over their pasts and, causally, themselves."""
    for worker in prange(workers):
        _take_tasks(asked, pages, scoring, tasks, work, counters, worker, workers)
