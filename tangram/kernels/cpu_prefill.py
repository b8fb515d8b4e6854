"""Numba code of the CPU prefill kernel, called by `cpu.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from tangram.kernels.cpu_intrinsics import next_task
from tangram.kernels.cpu_products import (
    LANES,
    TILE_ROWS,
    multiply_four,
    multiply_one,
    to_bfloat16,
)
from tangram.kernels.cpu_tasks import (
    FAST,
    exp_negative,
    largest,
    widen,
    widen_bfloat16,
    widen_e4m3,
    cap
)
from tangram.kernels.numba_cache import compile_kept

BLOCK = 128  # entries that are packed at a time
TASK_QUERIES = 384  # of a task; a query of each of the G heads counts


def take(block: Any, begin: int, end: int, out: Any, at: int, wide: Any) -> None: ...


@overload(take)
def _compile_take(block, begin, end, out, at, wide):
    if block.dtype == out.dtype:

        def copy(block, begin, end, out, at, wide):
            for t in range(begin, end):
                for d in range(block.shape[1]):
                    out[at + t - begin, d] = block[t, d]

        return copy
    if out.dtype == types.float32:
        convert = widen_bfloat16 if block.dtype == types.uint16 else widen_e4m3

        def widen_entries(block, begin, end, out, at, wide):
            convert(block[begin:end], 0, end - begin, out[at:])

        return widen_entries

    def round_entries(block, begin, end, out, at, wide):
        found = widen(block, begin, end, wide)
        for t in range(begin, end):
            for d in range(block.shape[1]):
                out[at + t - begin, d] = to_bfloat16(found[t, d])

    return round_entries


def pack_values(values: Any, count: int, packed: Any) -> None: ...


@overload(pack_values)
def _compile_pack_values(values, count, packed):
    if values.dtype == types.float32:

        def copy(values, count, packed):
            for t in range(count):
                for d in range(values.shape[1]):
                    packed[t, d] = values[t, d]

        return copy

    def pair(values, count, packed):
        words = packed.view(np.uint32)
        for t in range(count // 2):
            for d in range(values.shape[1]):
                words[t, d] = np.uint32(values[2 * t, d]) | np.uint32(values[2 * t + 1, d]) << np.uint32(16)

    return pair


@compile_kept()
def pack_keys(keys, count, packed):
    source, words = keys.view(np.uint32), packed.view(np.uint32)
    for t in range(0, count, 16):
        for d in range(source.shape[1]):
            for i in range(16):
                words[d, t + i] = source[t + i, d]


def narrow(row: Any, factor: Any, out: Any, count: int) -> None: ...


@overload(narrow)
def _compile_narrow(row, factor, out, count):
    if out.dtype == types.float32:

        def scale(row, factor, out, count):
            for d in range(count):
                out[d] = row[d] * factor

        return scale

    def scale_and_round(row, factor, out, count):
        for d in range(count):
            out[d] = to_bfloat16(row[d] * factor)

    return scale_and_round


@compile_kept()
def multiply(a, row, steps, b, c, place, columns, adds):
    column = 0
    while column + 4 * LANES <= columns:
        multiply_four(a, row, steps, b, c, place, column, adds)
        column += 4 * LANES
    while column < columns:
        multiply_one(a, row, steps, b, c, place, column, adds)
        column += LANES


@compile_kept(fastmath=FAST)
def weigh(s, columns, scaling, maximum, total, out, m, weights):
    top = max(maximum[m], scaling * largest(s, columns))
    if top == -np.inf:
        for i in range(columns):
            s[i] = 0
        narrow(s, np.float32(1.0), weights, columns)
        return
    if top > maximum[m]:
        shrink = exp_negative(maximum[m] - top)
        total[m] *= shrink
        for d in range(out.shape[1]):
            out[m, d] *= shrink
        maximum[m] = top
    part = np.float32(0.0)
    for i in range(columns):
        w = exp_negative(s[i] * scaling - top)
        s[i] = w
        part += w
    total[m] += part
    narrow(s, np.float32(1.0), weights, columns)


@compile_kept()
def read_block(k, v, blocks, heads_per_page, tables, table, column, head, begin, past, first_key, start, stop, keys, values, wide):
    """Entries [start, stop) of past and own."""
    page_tokens = blocks.shape[2]
    entry = start
    while entry < min(stop, past):
        place = (begin + entry) % page_tokens
        block = tables[table + (begin + entry) // page_tokens] * heads_per_page + column
        last = min(page_tokens, place + min(stop, past) - entry)
        take(blocks[block, 0], place, last, keys, entry - start, wide)
        take(blocks[block, 1], place, last, values, entry - start, wide)
        entry += last - place
    while entry < stop:
        at = first_key + entry - past
        keys[entry - start] = k[at, head]
        values[entry - start] = v[at, head]
        entry += 1
    last = (stop - start + LANES - 1) // LANES * LANES
    keys[stop - start : last] = 0
    values[stop - start : last] = 0


@compile_kept()
def attend_rows(q, k, v, out, blocks, heads_per_page, tables, task, address, spans, window, scaling, softcap, sinks,
    query, keys, values, packed_keys, packed_values, scores, weights, wide, sums, maximum, total):
    row, head, first, last = task
    begin_query, end_query, first_key, last_key, position = spans[row]
    table, column, length = address[row, head]
    group = q.shape[1] // k.shape[1]
    begin = 0
    if window > 0:
        begin = max(0, position - window + 1)
    past = length - begin
    lead = past + (last_key - first_key) - (end_query - begin_query)
    count = (last - first) * group
    head_dim = q.shape[2]
    per_word = 4 // q.itemsize
    rows = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for r in range(count):
        query[r] = q[begin_query + first + r // group, head * group + r % group]
    query[count:rows] = 0
    sums[:rows] = 0
    maximum[:rows] = -np.inf
    total[:rows] = 0
    end = lead + last  # entries
    oldest = 0
    if window > 0:
        oldest = max(0, lead + first + 1 - window)
    for start in range(oldest // BLOCK * BLOCK, end, BLOCK):
        stop = min(start + BLOCK, end)
        read_block(k, v, blocks, heads_per_page, tables, table, column, head, begin, past, first_key, start, stop, keys, values, wide)
        most = (stop - start + LANES - 1) // LANES * LANES
        pack_keys(keys, most, packed_keys)
        pack_values(values, most, packed_values)
        for r in range(0, rows, TILE_ROWS):
            newest = lead + first + min(r + TILE_ROWS - 1, count - 1) // group
            if newest < start:
                continue
            if window > 0 and lead + first + r // group + 1 - window >= stop:
                continue
            columns = min(most, (newest - start) // LANES * LANES + LANES)
            multiply(query, r, head_dim // per_word, packed_keys, scores, 0, columns, False)
            if softcap > 0:
                for m in range(TILE_ROWS):
                    for i in range(columns):
                        scores[m, i] *= scaling
                cap(scores, columns, softcap)
            for m in range(TILE_ROWS):
                own = lead + first + (r + m) // group
                for i in range(max(0, own + 1 - start), columns):
                    scores[m, i] = -np.inf
                if window > 0:
                    for i in range(min(columns, max(0, own + 1 - window - start))):
                        scores[m, i] = -np.inf
                weigh(scores[m], columns, np.float32(1.0) if softcap > 0 else scaling, maximum, total, sums, r + m, weights[m])
            multiply(weights, 0, columns // per_word, packed_values, sums, r, sums.shape[1], True)
    for r in range(count):
        h = head * group + r % group
        share = total[r] + np.exp(sinks[h] - maximum[r])
        narrow(sums[r], np.float32(1.0) / share, out[begin_query + first + r // group, h], head_dim)


@compile_kept()
def _work(q, k, v, out, blocks, heads_per_page, tables, tasks, address, spans, window, scaling, softcap, sinks, most, counters, worker, workers):
    head_dim = q.shape[2]
    per_word = 4 // q.itemsize
    width = (head_dim + LANES - 1) // LANES * LANES
    query = np.empty((most, head_dim), q.dtype)
    keys = np.empty((BLOCK, head_dim), q.dtype)
    values = np.empty((BLOCK, head_dim), q.dtype)
    packed_keys = np.empty((head_dim // per_word, BLOCK * per_word), q.dtype)
    packed_values = np.zeros((BLOCK // per_word, width * per_word), q.dtype)
    scores = np.empty((TILE_ROWS, BLOCK), np.float32)
    weights = np.empty((TILE_ROWS, BLOCK), q.dtype)
    wide = np.empty((blocks.shape[2], head_dim), np.float32)
    sums = np.empty((most, width), np.float32)
    maximum = np.empty(most, np.float32)
    total = np.empty(most, np.float32)
    while True:
        task = next_task(counters, worker, workers)
        if task >= len(tasks):
            break
        attend_rows(q, k, v, out, blocks, heads_per_page, tables, tasks[task], address, spans, window, scaling, softcap, sinks,
            query, keys, values, packed_keys, packed_values, scores, weights, wide, sums, maximum, total)


@compile_kept(parallel=True)
def attend_chunks(q, k, v, out, pool, tables, tasks, address, spans, window, scaling, softcap, sinks, most, workers):
    heads_per_page = pool.shape[1]
    blocks = pool.reshape((pool.shape[0] * heads_per_page, pool.shape[2], pool.shape[3], pool.shape[4]))
    counters = np.arange(workers)
    for worker in prange(workers):
        _work(q, k, v, out, blocks, heads_per_page, tables, tasks, address, spans, window, scaling, softcap, sinks, most, counters, worker, workers)
