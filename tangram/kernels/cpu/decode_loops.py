"""Numba code of decode.

A task processes its range in blocks of `STRETCH` entries: scores for all query heads, online
softmax, then values (running maximum and sum, FlashAttention). So each key and value is read from
memory once for its G query heads.

Numba knows no bfloat16 and no FP8. Pools of these dtypes come as the unsigned integers of their
bits, and are widened as they are read. Everything else is computed in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tangram.kernels.cpu.entry_products import KEYS, add_values, dot_keys
from tangram.kernels.cpu.intrinsics import larger, next_task, power_of_two, prefetch
from tangram.numba_cache import compile_kept
from tangram.plan.loops import resolve
from tangram.plan.records import RangeKind

STRETCH = 128
CACHE_LINE = 64  # bytes
# KV elements of a layer below which waking a second thread costs more than it saves.
SERIAL_ELEMENTS = 1 << 17
# Sums may be reordered and fused, which vectorises them; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
NOTICE = "compiling the CPU kernels, once on this machine: takes about 20 s"


class DecodeTokens(NamedTuple):
    """The tokens of a step's rows: row r has first[r] to first[r + 1].

    `queries` [T, H, G, D] and `out` [T, H, G, V], `sinks` [H, G] and `lengths` as in the reference;
    `softcap` is 0 where there is none.
    """

    queries: Any
    first: Any
    out: Any
    lengths: Any
    sinks: Any
    scaling: Any
    softcap: Any


class Pages(NamedTuple):
    """The pool as `blocks` [pages · Hp, S, P, D], and the block `tables`."""

    blocks: Any
    heads_per_page: Any
    tables: Any


class LayerTasks(NamedTuple):
    """The records of a `WorkPlan`, and the partial results of its largest layer."""

    tasks: Any
    entries: Any
    segments: Any
    slots: Any
    tile: Any


@compile_kept()
def prefetch_part(pages, table, column, part, entry, end):  # type: ignore[no-untyped-def]
    """Prefetch the keys (part 0) or values of the page of `entry`, if it is before `end`."""
    blocks, heads_per_page, tables = pages
    if entry >= end:
        return
    page, dim = blocks.shape[2:]
    block = tables[table + entry // page] * heads_per_page + column
    begin = (block * blocks.shape[1] + part) * page * dim
    for place in range(begin, begin + page * dim, CACHE_LINE // blocks.itemsize):
        prefetch(blocks, place)  # type: ignore[call-arg]


@compile_kept()
def prefetch_stretch(pages, table, column, begin, end):  # type: ignore[no-untyped-def]
    """Prefetch the first `STRETCH` of the entries [begin, end)."""
    page = pages.blocks.shape[2]
    stop = min(begin + STRETCH, end)
    for part in range(pages.blocks.shape[1]):
        for entry in range(begin // page * page, stop, page):
            prefetch_part(pages, table, column, part, entry, stop)


@compile_kept(inline="always")
def exp_negative(x: Any) -> Any:
    """exp(x) for x ≤ 0 in float32, to 2 units in the last place, vectorisable.

    0 below −87, so also for −∞.
    """
    y = max(x, np.float32(-87.0))
    n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
    r = y - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scaled = p * power_of_two(np.int32(n))  # type: ignore[call-arg]
    return scaled if x > np.float32(-87.0) else np.float32(0.0)


@compile_kept()
def useful_threads(tasks, first, last, lengths, tile, head_dim, threads):  # type: ignore[no-untyped-def]
    """`threads`, or 1 where tasks [first, last) read too little to share.

    `tasks` are those of a `WorkPlan`.
    """
    tokens = 0
    for number in range(first, last):
        task = tasks[number]
        length = lengths[task["length_index"]]
        begin, end = resolve(task["kind"], task["a"], task["b"], length, tile)
        tokens += end - begin
    return threads if tokens * head_dim * 2 > SERIAL_ELEMENTS else 1


@compile_kept()
def append_rows(k, v, pages, lengths, first, address):  # type: ignore[no-untyped-def]
    """Write k, v [T, H, D] so that the last token of a row is at index length − 1.

    They have the dtype of the pool; latents are keys and values. Row r has the tokens first[r] to
    first[r + 1]. `address` [R, H] are records of `ADDRESS`.
    """
    blocks, heads_per_page, tables = pages
    page_tokens = blocks.shape[2]
    for row in range(address.shape[0]):
        for head in range(k.shape[1]):
            record = address[row, head]
            end = lengths[record["length_index"]] - first[row + 1]
            for token in range(first[row], first[row + 1]):
                index = end + token
                page = tables[record["table"] + index // page_tokens]
                block, place = page * heads_per_page + record["column"], index % page_tokens
                blocks[block, 0, place, :] = k[token, head]
                if blocks.shape[1] == 2:
                    blocks[block, 1, place, :] = v[token, head]


@compile_kept()
def largest(scores, count):  # type: ignore[no-untyped-def]
    """The maximum of scores[:count], count ≥ 1."""
    top = scores[0]
    for i in range(count):
        top = larger(top, scores[i])  # type: ignore[call-arg]
    return top


@compile_kept(fastmath=FAST)
def cap(scores, count, softcap):  # type: ignore[no-untyped-def]
    """Bound scores[m, :count] to softcap · tanh(s / softcap), to a millionth of softcap."""
    for m in range(scores.shape[0]):
        for i in range(count):
            part = exp_negative(abs(scores[m, i]) * (np.float32(-2.0) / softcap))
            bounded = softcap * (np.float32(1.0) - part) / (np.float32(1.0) + part)
            scores[m, i] = bounded if scores[m, i] > np.float32(0.0) else -bounded


@compile_kept(fastmath=FAST)
def online_softmax(scores, count, maximum, total, out):  # type: ignore[no-untyped-def]
    """Turn scores[m, :count] into weights, and the rest of `STRETCH` scores into zeros.

    Updates the running maximum and sum, and rescales `out` where the maximum rises.
    """
    for m in range(out.shape[0]):
        s = scores[m, :STRETCH]
        s[count:] = np.float32(-np.inf)
        top = max(maximum[m], largest(s, count))
        if top == -np.inf:  # nothing is visible yet
            s[:count] = np.float32(0.0)
            continue
        if top > maximum[m]:
            shrink = exp_negative(maximum[m] - top)
            total[m] *= shrink
            for d in range(out.shape[1]):
                out[m, d] *= shrink
            maximum[m] = top
        part = np.float32(0.0)
        for i in range(STRETCH):
            s[i] = exp_negative(s[i] - top)
            part += s[i]
        total[m] += part


@compile_kept()
def hide(scores, start, stop, oldest, newest):  # type: ignore[no-untyped-def]
    """scores[m, i] = −∞ for entries start + i before oldest[m] or after newest[m]."""
    for m in range(oldest.shape[0]):
        for entry in range(start, min(stop, oldest[m])):
            scores[m, entry - start] = -np.inf
        for entry in range(max(start, newest[m] + 1), stop):
            scores[m, entry - start] = -np.inf


@compile_kept()
def score_pages(query, pages, table, column, start, stop, end, scores):  # type: ignore[no-untyped-def]
    """scores[m, i] = query[m] · key of entry start + i, for the entries before `stop`.

    What follows up to `end` is prefetched, `STRETCH` entries ahead.
    """
    blocks, heads_per_page, tables = pages
    page_tokens = blocks.shape[2]
    for page in range(start // page_tokens, (stop - 1) // page_tokens + 1):
        block, first = tables[table + page] * heads_per_page + column, page * page_tokens
        prefetch_part(pages, table, column, 0, first + STRETCH, end)
        low, high = max(start, first), min(stop, first + page_tokens)
        dot_keys(query, blocks, block, low - first, high - first, scores, low - start)


@compile_kept()
def add_pages(weights, pages, table, column, start, stop, end, out):  # type: ignore[no-untyped-def]
    """out[m] += Σ weights[m, i] · value of entry start + i, over the entries before `stop`.

    What follows up to `end` is prefetched, `STRETCH` entries ahead.
    """
    blocks, heads_per_page, tables = pages
    page_tokens, value = blocks.shape[2], blocks.shape[1] - 1
    for page in range(start // page_tokens, (stop - 1) // page_tokens + 1):
        block, first = tables[table + page] * heads_per_page + column, page * page_tokens
        if value:
            prefetch_part(pages, table, column, value, first + STRETCH, end)
        low, high = max(start, first), min(stop, first + page_tokens)
        add_values(weights, low - start, blocks, block, low - first, high - first, out)


@compile_kept()
def attend(query, oldest, newest, pages, table, column, begin, end, softcap, out, lse):  # type: ignore[no-untyped-def]
    """Attention of query [M, D] (already scaled) over entries [begin, end) of one head.

    Query m sees entries oldest[m] to newest[m] of them; all, where these arrays are empty. Writes
    out [M, V] and lse [M]. The values of latents are the first V elements of the keys.
    """
    scores = np.empty((query.shape[0], STRETCH + KEYS), np.float32)
    maximum = np.full(query.shape[0], -np.inf, np.float32)
    total = np.zeros(query.shape[0], np.float32)
    out[:] = 0
    masked = oldest.shape[0] > 0
    seen_from, seen_to = (oldest.max(), newest.min() + 1) if masked else (begin, end)
    prefetch_stretch(pages, table, column, begin, end)
    for start in range(begin, end, STRETCH):
        stop = min(start + STRETCH, end)
        score_pages(query, pages, table, column, start, stop, end, scores)
        if softcap > 0:
            cap(scores, stop - start, softcap)
        if masked and (start < seen_from or stop > seen_to):
            hide(scores, start, stop, oldest, newest)
        online_softmax(scores, stop - start, maximum, total, out)
        add_pages(scores, pages, table, column, start, stop, end, out)
    for m in range(query.shape[0]):
        lse[m] = -np.inf
        if total[m] > 0:
            lse[m] = maximum[m] + np.log(total[m])
            out[m] /= total[m]


@compile_kept()
def finish(part, lse, sinks, out):  # type: ignore[no-untyped-def]
    """Write part [G, D] with log-sum-exp lse [G] to out [G, D], weighted for the sinks [G]."""
    for g in range(part.shape[0]):
        if lse[g] == -np.inf:
            out[g, :] = 0
        else:
            out[g, :] = part[g] * np.float32(1.0 / (1.0 + np.exp(sinks[g] - lse[g])))


@compile_kept()
def merge(begin, end, number, partial_out, partial_lse, sinks, out):  # type: ignore[no-untyped-def]
    """Merge the parts in slots `begin` to `end`, of token `number` of a row, into out [G, D].

    Slots are those of partial_out [slots, tokens, G, D] and partial_lse [slots, tokens, G].
    """
    for g in range(out.shape[0]):
        top = -np.inf
        for slot in range(begin, end):
            top = max(top, partial_lse[slot, number, g])
        out[g, :] = 0
        if top == -np.inf:
            continue
        total = np.exp(sinks[g] - top)
        for slot in range(begin, end):
            total += np.exp(partial_lse[slot, number, g] - top)
        for slot in range(begin, end):
            weight = np.float32(np.exp(partial_lse[slot, number, g] - top) / total)
            for d in range(out.shape[1]):
                out[g, d] += weight * partial_out[slot, number, g, d]


@compile_kept()
def gather_queries(rows, entries, head):  # type: ignore[no-untyped-def]
    """The scaled queries [M, D] of one KV head for all tokens of the rows in `entries`."""
    first, group = rows.first, rows.queries.shape[2]
    count = 0
    for entry in entries:
        count += first[entry["row"] + 1] - first[entry["row"]]
    query = np.empty((count * group, rows.queries.shape[3]), np.float32)
    at = 0
    for entry in entries:
        for token in range(first[entry["row"]], first[entry["row"] + 1]):
            query[at : at + group] = rows.queries[token, head] * rows.scaling
            at += group
    return query


@compile_kept()
def keep_parts(rows, entries, head, out, lse, partial_out, partial_lse):  # type: ignore[no-untyped-def]
    """Write the results of a task, out [M, V] and lse [M], to where its `entries` say."""
    first, group = rows.first, rows.queries.shape[2]
    at = 0
    for entry in entries:
        for token in range(first[entry["row"]], first[entry["row"] + 1]):
            part, part_lse = out[at : at + group], lse[at : at + group]
            at += group
            if entry["direct"]:
                finish(part, part_lse, rows.sinks[head], rows.out[token, head])
            else:
                number = token - first[entry["row"]]
                partial_out[entry["slot"], number] = part
                partial_lse[entry["slot"], number] = part_lse


@compile_kept()
def run_task(rows, pages, tasks, task, partial_out, partial_lse):  # type: ignore[no-untyped-def]
    """One task: its attention, and where its results go."""
    record = tasks.tasks[task]
    length, entries = (
        rows.lengths[record["length_index"]],
        tasks.entries[record["row_begin"] : record["row_end"]],
    )
    begin, end = resolve(record["kind"], record["a"], record["b"], length, tasks.tile)
    query, group = gather_queries(rows, entries, record["head"]), rows.queries.shape[2]
    # What several rows share is older than the tokens of any of them.
    drafts = query.shape[0] // group - 1 if len(entries) == 1 else 0
    bounds = query.shape[0] if drafts else 0
    oldest, newest = np.zeros(bounds, np.int64), np.empty(bounds, np.int64)
    if len(entries) == 1:  # refused drafts may have made it shorter than it was
        end = min(end, length)
    for m in range(bounds):
        newest[m] = length - 1 - drafts + m // group
    if record["kind"] == RangeKind.WINDOW and drafts:
        begin = max(begin - drafts, 0)
        oldest[:] = np.maximum(newest + 1 - record["a"], 0)
    out = np.empty((query.shape[0], rows.out.shape[3]), np.float32)
    lse = np.empty(query.shape[0], np.float32)
    place = record["table"], record["column"]
    attend(query, oldest, newest, pages, *place, begin, end, rows.softcap, out, lse)
    keep_parts(rows, entries, record["head"], out, lse, partial_out, partial_lse)


@compile_kept()
def run_tasks(rows, pages, tasks, end, partials, counter):  # type: ignore[no-untyped-def]
    """The loop of one thread: take the next task until none is left."""
    while True:
        task = next_task(counter)  # type: ignore[call-arg,var-annotated]
        if task >= end:
            break
        run_task(rows, pages, tasks, task, partials[0], partials[1])


@compile_kept(parallel=True, notice=NOTICE)
def step(rows, k, v, pages, tasks, layer, address, workers):  # type: ignore[no-untyped-def]
    """One layer: append k, v, run its tasks, then merge its segments.

    `rows` are `DecodeTokens`, `pages` `Pages`, `tasks` `LayerTasks`; `layer` has the ends of the
    layer's tasks and segments, `address` [R, H] is as in `append_rows`.
    """
    task_begin, task_end, segment_begin, segment_end = layer
    first, group, width = rows.first, rows.queries.shape[2], rows.out.shape[3]
    most = 1
    for row in range(address.shape[0]):
        most = max(most, first[row + 1] - first[row])
    append_rows(k, v, pages, rows.lengths, first, address)
    partials = (
        np.empty((tasks.slots, most, group, width), np.float32),
        np.empty((tasks.slots, most, group), np.float32),
    )
    counter, head_dim = np.full(1, task_begin), rows.queries.shape[3]
    used = useful_threads(
        tasks.tasks, task_begin, task_end, rows.lengths, tasks.tile, head_dim, workers
    )
    if used == 1:
        run_tasks(rows, pages, tasks, task_end, partials, counter)
    else:
        for _ in prange(workers):
            run_tasks(rows, pages, tasks, task_end, partials, counter)
    for segment in range(segment_begin, segment_end):
        record = tasks.segments[segment]
        for number in range(first[record["row"] + 1] - first[record["row"]]):
            merge(
                record["first_slot"],
                record["end_slot"],
                number,
                partials[0],
                partials[1],
                rows.sinks[record["head"]],
                rows.out[first[record["row"]] + number, record["head"]],
            )
