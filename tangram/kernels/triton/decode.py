"""Decode attention over ragged pages on the GPU (Triton): one task of a work plan per program.

A task reads its range of one KV head's entries once for all the query rows it serves (PAT, forward;
PersistentKV, work queue). Its M = rows x G queries form one tile of 16, 32, 64 or 128. Tasks of one
size are launched together. Queries are read and outputs written by index, so that the rows of a
task need not be neighbours. A row's only part is final; other parts go to slots. A row's short
tail, launched last, waits for its other parts and finishes the row (`_finish`). Rows without such
a tail are merged in the plan's order by `merge.py`.

An entry is a key and a value, or a latent, read once for both. A latent of D elements is V of the
value and the rotary rest. Each has a block of its own: of a power of two above D half is empty.

Sums are in float32, exponentials base 2. The grid is fixed and the number of tasks is read from
memory, so that a captured graph replays with any plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.triton.e4m3 import to_half, widen_pairs, words
from tangram.kernels.triton.tiles import (
    ENTRY,
    LOG2E,
    OPEN,
    TASK,
    WINDOW,
    let_next_start,
    multiply,
    resolve_range,
    size,
    soft_cap,
    take_part,
    wait_for_tasks,
    word,
)


@triton.jit
def _cut(x, PARTS: tl.constexpr):
    """The parts [M, D / PARTS] of x [M, D]: x itself, or its even and its odd elements."""
    return (x,) if PARTS == 1 else tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def _join(parts, M: tl.constexpr, D: tl.constexpr):
    """What `_cut` has cut, as [M, D] again."""
    return parts[0] if len(parts) == 1 else tl.join(parts[0], parts[1]).reshape(M, D)


@triton.jit
def _turn(parts):
    """Each part transposed."""
    return (tl.trans(parts[0]),) if len(parts) == 1 else (tl.trans(parts[0]), tl.trans(parts[1]))


@triton.jit
def _widen(x, pool, dtype: tl.constexpr):
    """Words `x` of `pool` as parts in `dtype`."""
    return widen_pairs(x, pool, dtype) if x.dtype == tl.uint16 else (x.to(dtype),)


@triton.jit
def _take(
    softmax,
    q,
    page,
    n,
    seen,
    pool,
    column,
    scoring,
    HP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NQ: tl.constexpr,
):
    """Add the entries `n`, on pages `page`, to the online `softmax`: acc, peak and total.

    `acc` and `q` are in parts (`_cut`): two if entries are FP8. `scoring` are scaling, softcap and
    the scale of keys. Where MASKED, entries are left out by `seen`: those from `stop` on, and with
    several queries a row those outside [low, high) of each query.
    """
    acc, peak, total = softmax
    stop, low, high = seen
    scaling, softcap, k_scale = scoring
    PARTS: tl.constexpr = len(q)
    ROWS: tl.constexpr = q[0].shape[0]
    d = tl.arange(0, BLOCK_D // PARTS)
    entry = (page.to(tl.int64) * HP + column) * (2 * P * D) + (n % P) * D
    place = words(pool, PARTS) + (entry // PARTS)[:, None] + d[None, :]
    # Entries read by few rows must not evict shared entries and partial results from L2.
    keep: tl.constexpr = "evict_first" if ROWS <= 16 * NQ else "evict_last"
    if MASKED:
        here = (n < stop)[:, None] & (d < D // PARTS)[None, :]
        k = tl.load(place, mask=here, other=0, eviction_policy=keep)
        v = tl.load(place + P * D // PARTS, mask=here, other=0, eviction_policy=keep)
    elif BLOCK_D != D:
        k = tl.load(place, mask=(d < D // PARTS)[None, :], other=0, eviction_policy=keep)
        v = tl.load(
            place + P * D // PARTS, mask=(d < D // PARTS)[None, :], other=0, eviction_policy=keep
        )
    else:
        k = tl.load(place, eviction_policy=keep)
        v = tl.load(place + P * D // PARTS, eviction_policy=keep)
    scores = tl.zeros([ROWS, BLOCK_N], tl.float32)
    keys = _widen(k, pool, q[0].dtype)
    for part in tl.static_range(PARTS):
        scores = multiply(q[part], tl.trans(keys[part]), scores)
    if SOFTCAP:
        scores = soft_cap(scores, scaling * k_scale, softcap)
    else:
        scores = scores * (scaling * k_scale * LOG2E)
    if MASKED:
        scores = tl.where((n < stop)[None, :], scores, float("-inf"))
        if NQ > 1:
            visible = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
            scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = new_peak
    if MASKED:  # an EMPTY range has no entries
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(peak - safe)
    values = _widen(v, pool, q[0].dtype)
    rounded = weights.to(q[0].dtype)
    total = total * shrink + tl.sum(weights, 1)
    if PARTS == 1:
        acc = (multiply(rounded, values[0], acc[0] * shrink[:, None]),)
    else:
        even = multiply(rounded, values[0], acc[0] * shrink[:, None])
        acc = (even, multiply(rounded, values[1], acc[1] * shrink[:, None]))
    return acc, new_peak, total


@triton.jit
def _tiles(
    softmax,
    q,
    pool,
    table,
    column,
    begin,
    end,
    seen,
    scoring,
    HP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NQ: tl.constexpr,
):
    """Online softmax of `q` over entries [begin, end) by tiles; see `_take`."""
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        if MASKED:
            page = tl.load(table + n // P, mask=n < seen[0], other=0)
        else:
            page = tl.load(table + n // P)
        softmax = _take(
            *(softmax, q, page, n, seen, pool, column, scoring),
            *(HP, P, D, BLOCK_D, BLOCK_N, MASKED, SOFTCAP, NQ),
        )
    return softmax


@triton.jit
def _along_entries(x, TURNED: tl.constexpr):
    """x [N] of entries, to be broadcast over queries."""
    return x[:, None] if TURNED else x[None, :]


@triton.jit
def _along_queries(x, TURNED: tl.constexpr):
    """x [M] of queries, to be broadcast over entries, or over elements of values."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def _product(q, entries, sums, TURNED: tl.constexpr):
    """Sums + the products of q [M, D] with entries [N, D]: [N, M] if TURNED, or [M, N]."""
    return multiply(entries, tl.trans(q), sums) if TURNED else multiply(q, tl.trans(entries), sums)


@triton.jit
def _mean(weights, values, sums, TURNED: tl.constexpr):
    """Sums + values [N, V] times weights: [V, M] if TURNED, of weights [N, M], or [M, V]."""
    return multiply(tl.trans(values), weights, sums) if TURNED else multiply(weights, values, sums)


@triton.jit
def _look_up(table, n, begin, stop, P: tl.constexpr):
    """The places `n`, or the last before `stop`, and their pages."""
    n = tl.minimum(n, stop - 1)
    return n, tl.load(table + n // P, mask=stop > begin, other=0)


@triton.jit
def _load_latents(
    pool,
    page,
    n,
    column,
    HP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Words of the latents `n` on pages `page`, and of their rotary elements."""
    d = tl.arange(0, BLOCK_D // PARTS)
    r = tl.arange(0, BLOCK_R // PARTS)
    entry = (page.to(tl.int64) * HP + column) * (P * D) + (n % P) * D
    place = words(pool, PARTS) + (entry // PARTS)[:, None] + d[None, :]
    if BLOCK_D == V:
        latents = tl.load(place, eviction_policy=KEEP)
    else:
        latents = tl.load(place, mask=(d < V // PARTS)[None, :], other=0, eviction_policy=KEEP)
    place = words(pool, PARTS) + ((entry + V) // PARTS)[:, None] + r[None, :]
    if BLOCK_R == D - V:
        rotary = tl.load(place, eviction_policy=KEEP)
    else:
        rotary = tl.load(place, mask=(r < (D - V) // PARTS)[None, :], other=0, eviction_policy=KEEP)
    return latents, rotary


@triton.jit
def _take_latents(
    softmax,
    q,
    q_rotary,
    pool,
    table,
    column,
    begin,
    seen,
    scoring,
    HP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NQ: tl.constexpr,
    TURNED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Online softmax over the latents [begin, stop), each loaded once as key and value (`_take`).

    Pages are looked up a tile ahead, so that no load of entries waits for them. If TURNED, queries
    are the columns of scores and of means, `acc` [V, M]: few of them then waste nothing of a
    product of 64 rows.
    """
    acc, peak, total = softmax
    stop, low, high = seen
    scaling = scoring[0] * scoring[2]
    PARTS: tl.constexpr = len(q)
    QUERIES: tl.constexpr = q[0].shape[0]
    AXIS: tl.constexpr = 0 if TURNED else 1
    here, page = _look_up(table, begin + tl.arange(0, BLOCK_N), begin, stop, P)
    for first in range(begin, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        latents, rotary = _load_latents(
            pool, page, here, column, HP, P, D, V, BLOCK_D, BLOCK_R, PARTS, KEEP
        )
        here, page = _look_up(table, n + BLOCK_N, begin, stop, P)
        if TURNED:
            scores = tl.zeros([BLOCK_N, QUERIES], tl.float32)
        else:
            scores = tl.zeros([QUERIES, BLOCK_N], tl.float32)
        values, rotaries = (_widen(latents, pool, q[0].dtype), _widen(rotary, pool, q[0].dtype))
        for part in tl.static_range(PARTS):
            scores = _product(q[part], values[part], scores, TURNED)
        for part in tl.static_range(PARTS):
            scores = _product(q_rotary[part], rotaries[part], scores, TURNED)
        if SOFTCAP:
            scores = soft_cap(scores, scaling, scoring[1])
        else:
            scores = scores * (scaling * LOG2E)
        visible = _along_entries(n < stop, TURNED)
        if NQ > 1:
            place = _along_entries(n, TURNED)
            visible = visible & (place >= _along_queries(low, TURNED))
            visible = visible & (place < _along_queries(high, TURNED))
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, AXIS))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - _along_queries(safe, TURNED))
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, AXIS)
        peak = new_peak
        rounded = weights.to(q[0].dtype)
        shrinks = _along_queries(shrink, TURNED)
        if PARTS == 1:
            acc = (_mean(rounded, values[0], acc[0] * shrinks, TURNED),)
        else:
            even = _mean(rounded, values[0], acc[0] * shrinks, TURNED)
            acc = (even, _mean(rounded, values[1], acc[1] * shrinks, TURNED))
    return acc, peak, total


@triton.jit
def _finish(
    softmax,
    part_out,
    part_lse,
    slot,
    before,
    G: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the `before` parts in front of `slot` to the online softmax of the last part.

    Each query row has its own number of parts.
    """
    acc, peak, total = softmax
    d = tl.arange(0, BLOCK_D)
    for back in range(tl.max(before, 0), 0, -1):
        here = back <= before
        at = slot - back * G
        # Other multiprocessors wrote these: bypass this one's own cache.
        lse = tl.load(part_lse + at, mask=here, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            part_out + at[:, None] * V + d[None, :],
            mask=here[:, None] & (d < V)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc, peak, total = take_part(acc, peak, total, lse, value)
    return acc, peak, total


@triton.jit(
    do_not_specialize=["layer", "leads", "table_entries"],
    do_not_specialize_on_alignment=[
        "tables",
        "lengths",
        "tasks",
        "task_indptr",
        "entries",
        "first_tokens",
    ],
)
def decode_tasks(
    q,
    pool,
    tables,
    lengths,
    tasks,
    task_indptr,
    entries,
    first_tokens,
    scales,
    sinks,
    out,
    part_out,
    part_lse,
    layer,
    leads,
    scaling,
    softcap,
    stride_row,
    stride_head,
    table_entries,
    KIND: tl.constexpr,
    KINDS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    SHORT: tl.constexpr,
    FINISH: tl.constexpr,
    CHAINED: tl.constexpr,
    NQ: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Run the tasks of one layer and one tile size.

    The grid is (tasks, BLOCK_M at a time of the queries of the longest task). BLOCK_R > 0: entries
    are latents, TURNED as in `_take_latents`, and the grid is the other way round, so that programs
    of one task run together and read its entries from L2. q [T, H*G, D] with any strides of tokens
    and heads, out [T, H*G, V]; pool, tables, lengths as in `kernels/reference.py`. With NQ > 1 row
    r has the tokens first_tokens[r] to first_tokens[r + 1], at most NQ of them. Each sees the
    entries up to its own. Otherwise row and token are the same.
    `task_indptr` [L, KINDS + 1] bounds the `tasks` of each layer and kind. `tasks` and `entries`
    are records of `plan/records.py`. `scales` [L, H, 2] multiply keys and values of an FP8 pool.
    part_out [slots, NQ * G, V] is in any floating dtype, part_lse [slots, NQ * G] in float32 (base
    2). SHORT needs NQ = 1.
    """
    GT: tl.constexpr = NQ * G
    TASK_AXIS: tl.constexpr = 1 if BLOCK_R else 0
    PARTS: tl.constexpr = 2 if pool.dtype.element_ty.primitive_bitwidth == 8 else 1
    # Waiting and releasing cost nothing where no launch depends on this one, so one kernel serves
    # as first, last and in between.
    if CHAINED:
        if leads:
            wait_for_tasks()  # the next launches read what was written before this chain
        let_next_start()
    begin_task = tl.load(task_indptr + layer * (KINDS + 1) + KIND)
    end_task = tl.load(task_indptr + layer * (KINDS + 1) + KIND + 1)
    for task in range(begin_task + tl.program_id(TASK_AXIS), end_task, tl.num_programs(TASK_AXIS)):
        record = tasks + task * size(TASK)
        table = tl.load(record + word(TASK, "table"))
        length_place = lengths + tl.load(record + word(TASK, "length_index"))
        column = tl.load(record + word(TASK, "column"))
        head = tl.load(record + word(TASK, "head"))
        m = tl.program_id(1 - TASK_AXIS) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        group = m % GT
        query_number = group // G
        low = tl.zeros([BLOCK_M], tl.int32)
        high = low
        if SHORT:
            # One row, named in the record itself: fewer dependent loads, which dominate short
            # tasks.
            serves = m < GT
            row = tl.load(record + word(TASK, "first.row")).to(tl.int64)
            row = row + tl.zeros([BLOCK_M], tl.int64)
            final = tl.load(record + word(TASK, "first.direct")) + tl.zeros([BLOCK_M], tl.int32)
            final = final == 1
            slot = tl.load(record + word(TASK, "first.slot")).to(tl.int64) * GT + group
        else:
            entry = tl.load(record + word(TASK, "row_begin")) + m // GT
            serves = entry < tl.load(record + word(TASK, "row_end"))
            line = entries + entry * size(ENTRY)
            row = tl.load(line + word(ENTRY, "row"), mask=serves, other=0).to(tl.int64)
            final = tl.load(line + word(ENTRY, "direct"), mask=serves, other=1) == 1
            slot = tl.load(line + word(ENTRY, "slot"), mask=serves, other=0).to(tl.int64)
            slot = slot * GT + group
        token = row
        if NQ > 1:
            token = tl.load(first_tokens + row, mask=serves, other=0).to(tl.int64)
            count = tl.load(first_tokens + row + 1, mask=serves, other=0) - token.to(tl.int32)
            serves = serves & (query_number < count)
            token = token + query_number
        place = (token * H + head) * G + group % G
        source = token * stride_row + (head * G + group % G) * stride_head
        query = tl.load(
            q + source[:, None] + d[None, :], mask=serves[:, None] & (d < V)[None, :], other=0.0
        )
        if BLOCK_R:
            r = tl.arange(0, BLOCK_R)
            rotary = tl.load(
                q + source[:, None] + V + r[None, :],
                mask=serves[:, None] & (r < D - V)[None, :],
                other=0.0,
            )
            if PARTS == 2 and rotary.dtype == tl.bfloat16:
                rotary = to_half(rotary)
            rotary = _cut(rotary, PARTS)
        if PARTS == 2 and query.dtype == tl.bfloat16:
            query = to_half(query)
        query = _cut(query, PARTS)
        k_scale = 1.0
        if SCALED:
            k_scale = tl.load(scales + (layer * H + head) * 2)
        acc = _cut(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), PARTS)
        if TURNED:
            acc = _turn(acc)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        softmax = acc, peak, tl.zeros([BLOCK_M], tl.float32)
        scoring = scaling, softcap, k_scale
        if SHORT and not BLOCK_R:
            # The first pages do not wait for the length: only entries below it are used.
            begin = tl.load(record + word(TASK, "a"))
            n = begin + tl.arange(0, BLOCK_N)
            page = tl.load(tables + tl.minimum(table + n // P, table_entries - 1))
            end = tl.load(record + word(TASK, "b"))
            if tl.load(record + word(TASK, "kind")) == OPEN:
                end = tl.load(length_place)
            softmax = _take(
                *(softmax, query, page, n, (end, begin, end), pool, column, scoring),
                *(HP, P, D, BLOCK_D, BLOCK_N, True, SOFTCAP, 1),
            )
            whole = begin + BLOCK_N
        else:
            begin, end = resolve_range(
                tl.load(record + word(TASK, "kind")),
                tl.load(record + word(TASK, "a")),
                tl.load(record + word(TASK, "b")),
                length_place,
                TILE,
            )
            visible_end = end
            if NQ > 1:
                # What several rows share is older than the tokens of any of them.
                row_end = tl.load(record + word(TASK, "row_end"))
                alone = row_end - tl.load(record + word(TASK, "row_begin")) == 1
                length = tl.load(length_place)
                drafts = tl.where(alone, tl.max(tl.where(serves, count, 1), 0) - 1, 0)
                high = tl.where(alone, length - drafts + query_number, 2147483647)
                if tl.load(record + word(TASK, "kind")) == WINDOW:
                    low = tl.maximum(high - tl.load(record + word(TASK, "a")), 0)
                    begin = tl.maximum(begin - drafts, 0)
                    visible_end = begin
                elif alone:
                    end = tl.minimum(end, length)
                    visible_end = tl.minimum(end, length - drafts)
            whole = begin + (tl.maximum(visible_end - begin, 0) // BLOCK_N) * BLOCK_N
            if not BLOCK_R:
                softmax = _tiles(
                    *(softmax, query, pool, tables + table, column, begin, whole),
                    *((end, low, high), scoring, HP, P, D, BLOCK_D, BLOCK_N, False, SOFTCAP, NQ),
                )
        if BLOCK_R:
            # A program without a query of this task reads nothing.
            end = tl.where(tl.max(serves.to(tl.int32), 0) > 0, end, begin)
            # An entry that one program reads must not evict partial results from L2.
            keep: tl.constexpr = (
                "evict_first" if GT <= BLOCK_M and BLOCK_M < 2 * GT else "evict_last"
            )
            acc, peak, total = _take_latents(
                *(softmax, query, rotary, pool, tables + table, column, begin, (end, low, high)),
                *(scoring, HP, P, D, V, BLOCK_D, BLOCK_R, BLOCK_N, SOFTCAP, NQ, TURNED, keep),
            )
            if TURNED:
                acc = _turn(acc)
        else:
            acc, peak, total = _tiles(
                *(softmax, query, pool, tables + table, column, whole, end),
                *((end, low, high), scoring, HP, P, D, BLOCK_D, BLOCK_N, True, SOFTCAP, NQ),
            )
        acc = _join(acc, BLOCK_M, BLOCK_D)
        if SCALED:
            acc = acc * tl.load(scales + (layer * H + head) * 2 + 1)
        if FINISH:
            if SHORT:
                before = tl.where(serves, tl.load(record + word(TASK, "first.before")), 0)
            else:
                before = tl.load(line + word(ENTRY, "before"), mask=serves, other=0)
            if CHAINED:
                wait_for_tasks()
            acc, peak, total = _finish(
                (acc, peak, total), part_out, part_lse, slot, before, GT, V, BLOCK_D
            )
        seen = tl.where(total > 0, total, 1.0)
        result = acc / seen[:, None]
        lse = tl.where(total > 0, peak + tl.log2(seen), float("-inf"))
        partial = serves & (final == 0)
        part = result.to(part_out.dtype.element_ty)
        tl.store(
            part_out + slot[:, None] * V + d[None, :],
            part,
            mask=partial[:, None] & (d < V)[None, :],
        )
        tl.store(part_lse + slot, lse, mask=partial)
        if SINKS:
            sink = tl.load(sinks + head * G + group % G).to(tl.float32) * LOG2E
            result = result / (1.0 + tl.exp2(sink - lse))[:, None]
        out_place = out + place[:, None] * V + d[None, :]
        tl.store(
            out_place,
            result.to(out.dtype.element_ty),
            mask=(serves & final)[:, None] & (d < V)[None, :],
        )
    if CHAINED:
        # A launch that waits for this one also waits for those before it.
        wait_for_tasks()
