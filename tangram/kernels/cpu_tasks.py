"""Numba code of the CPU decode kernel: one task, the append and the merge. Driven by `cpu.py`.

A task walks its range in stretches of `STRETCH` entries: scores for all query heads, online softmax, then values
(FlashAttention-style running maximum and sum), so that each key and value is read from memory once for its G query heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

STRETCH = 128
# KV elements of a layer below which waking a second thread costs more than it saves.
SERIAL_ELEMENTS = 1 << 17
# Sums may be reordered and fused, which vectorises them; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
KIND_ABS, KIND_OPEN, KIND_FRAC = 0, 1, 2


@intrinsic  # type: ignore[misc]
def fetch_add(typingctx: Any, counter: Any, amount: Any) -> Any:
    """Atomically add `amount` to counter[0] (int64, contiguous) and return the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, args[1], "monotonic")

    return types.int64(counter, types.int64), codegen


@intrinsic  # type: ignore[misc]
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose bits are the int32 `bits`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic  # type: ignore[misc]
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of element `offset` of a contiguous array; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        flags = [ir.Constant(ir.IntType(32), value) for value in (0, 3, 1)]  # read, keep in all levels, data
        function = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[flag.type for flag in flags]])
        callee = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
        builder.call(callee, [address, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@njit(cache=True)
def prefetch_block(block):  # type: ignore[no-untyped-def]
    """Ask for every cache line of a contiguous float32 block [P, D]."""
    for offset in range(0, block.size, 16):
        prefetch(block, offset)


@njit(cache=True, inline="always")
def exp_negative(x: Any) -> Any:
    """exp(x) for x ≤ 0 in float32, to 2 units in the last place, in a form that vectorises; 0 below −87 (so for −∞)."""
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
    scaled = p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return scaled if x > np.float32(-87.0) else np.float32(0.0)


@njit(cache=True)
def resolve_one(kind: int, a: int, b: int, length: int, tile: int) -> tuple[int, int]:
    """`plan.form.resolve` for one task."""
    if kind == KIND_ABS:
        return a, b
    if kind == KIND_OPEN:
        return min(a, length), length
    if kind == KIND_FRAC:
        tiles = (length + tile - 1) // tile
        return a * tiles // b * tile, min((a + 1) * tiles // b * tile, length)
    return max(length - a, 0), length


@njit(cache=True)
def useful_threads(tasks, first, last, lengths, tile, head_dim, threads):  # type: ignore[no-untyped-def]
    """`threads`, or 1 where tasks [first, last) (rows as in `CpuPlan.tasks`) read too little to share."""
    tokens = 0
    for task in range(first, last):
        begin, end = resolve_one(tasks[task, 4], tasks[task, 5], tasks[task, 6], lengths[tasks[task, 1]], tile)
        tokens += end - begin
    return threads if tokens * head_dim * 2 > SERIAL_ELEMENTS else 1


@njit(cache=True)
def append_rows(k, v, blocks, heads_per_page, tables, lengths, address):  # type: ignore[no-untyped-def]
    """Write k, v [R, H, D] at index length − 1; address [R, H, 3] holds table offset, column and length index."""
    page_tokens = blocks.shape[2]
    for row in range(k.shape[0]):
        for head in range(k.shape[1]):
            index = lengths[address[row, head, 2]] - 1
            page = tables[address[row, head, 0] + index // page_tokens]
            block, place = page * heads_per_page + address[row, head, 1], index % page_tokens
            blocks[block, 0, place, :] = k[row, head]
            blocks[block, 1, place, :] = v[row, head]


@njit(cache=True, fastmath=FAST)
def dot_keys(query, keys, begin, end, scores, at):  # type: ignore[no-untyped-def]
    """scores[m, at + i] = query[m] · keys[begin + i]; four keys share each load of the query."""
    head_dim = query.shape[1]
    for m in range(query.shape[0]):
        q = query[m]
        t = begin
        while t + 4 <= end:
            k0, k1, k2, k3 = keys[t], keys[t + 1], keys[t + 2], keys[t + 3]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                s0 += q[d] * k0[d]
                s1 += q[d] * k1[d]
                s2 += q[d] * k2[d]
                s3 += q[d] * k3[d]
            i = at + t - begin
            scores[m, i], scores[m, i + 1], scores[m, i + 2], scores[m, i + 3] = s0, s1, s2, s3
            t += 4
        while t < end:
            k0 = keys[t]
            s0 = np.float32(0.0)
            for d in range(head_dim):
                s0 += q[d] * k0[d]
            scores[m, at + t - begin] = s0
            t += 1


@njit(cache=True, fastmath=FAST)
def add_values(weights, at, values, begin, end, out):  # type: ignore[no-untyped-def]
    """out[m] += Σ weights[m, at + i] · values[begin + i]; four values share each load and store of the output."""
    head_dim = out.shape[1]
    for m in range(out.shape[0]):
        o, w = out[m], weights[m]
        t = begin
        while t + 4 <= end:
            i = at + t - begin
            w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
            v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
            for d in range(head_dim):
                o[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
            t += 4
        while t < end:
            w0, v0 = w[at + t - begin], values[t]
            for d in range(head_dim):
                o[d] += w0 * v0[d]
            t += 1


@njit(cache=True, fastmath=FAST | {"nnan"})
def largest(scores, count):  # type: ignore[no-untyped-def]
    """The maximum of scores[:count], count ≥ 1; assuming there is no NaN lets it vectorise."""
    top = scores[0]
    for i in range(1, count):
        top = max(top, scores[i])
    return top


@njit(cache=True, fastmath=FAST)
def online_softmax(scores, count, maximum, total, out, softcap):  # type: ignore[no-untyped-def]
    """Turn scores[m, :count] into weights; carry each row's running maximum and sum, and rescale `out` where it rises."""
    for m in range(out.shape[0]):
        s = scores[m]
        if softcap > 0:
            for i in range(count):
                s[i] = softcap * np.tanh(s[i] / softcap)
        top = max(maximum[m], largest(s, count))
        if top > maximum[m]:
            shrink = exp_negative(maximum[m] - top)
            total[m] *= shrink
            for d in range(out.shape[1]):
                out[m, d] *= shrink
            maximum[m] = top
        part = np.float32(0.0)
        for i in range(count):
            s[i] = exp_negative(s[i] - top)
            part += s[i]
        total[m] += part


@njit(cache=True)
def attend(query, blocks, heads_per_page, tables, table, column, begin, end, softcap, out, lse):  # type: ignore[no-untyped-def]
    """Attention of query [M, D] (already scaled) over entries [begin, end) of one head: out [M, D], lse [M]."""
    page_tokens = blocks.shape[2]
    scores = np.empty((query.shape[0], STRETCH), np.float32)
    maximum, total = np.full(query.shape[0], -np.inf, np.float32), np.zeros(query.shape[0], np.float32)
    out[:] = 0
    for start in range(begin, end, STRETCH):
        stop = min(start + STRETCH, end)
        first_page, last_page = start // page_tokens, (stop - 1) // page_tokens
        for page in range(first_page, last_page + 1):
            block, first = tables[table + page] * heads_per_page + column, page * page_tokens
            if page < last_page:
                prefetch_block(blocks[tables[table + page + 1] * heads_per_page + column, 0])
            else:
                prefetch_block(blocks[tables[table + first_page] * heads_per_page + column, 1])
            low, high = max(start, first), min(stop, first + page_tokens)
            dot_keys(query, blocks[block, 0], low - first, high - first, scores, low - start)
        online_softmax(scores, stop - start, maximum, total, out, softcap)
        for page in range(first_page, last_page + 1):
            block, first = tables[table + page] * heads_per_page + column, page * page_tokens
            if page < last_page:
                prefetch_block(blocks[tables[table + page + 1] * heads_per_page + column, 1])
            elif stop < end:
                prefetch_block(blocks[tables[table + stop // page_tokens] * heads_per_page + column, 0])
            low, high = max(start, first), min(stop, first + page_tokens)
            add_values(scores, low - start, blocks[block, 1], low - first, high - first, out)
    for m in range(query.shape[0]):
        lse[m] = -np.inf
        if total[m] > 0:
            lse[m] = maximum[m] + np.log(total[m])
            out[m] /= total[m]


@njit(cache=True)
def finish(part, lse, sinks, out):  # type: ignore[no-untyped-def]
    """Write part [G, D] with log-sum-exp lse [G] to out [G, D], with the weight that the sinks [G] leave to it."""
    for g in range(part.shape[0]):
        if lse[g] == -np.inf:
            out[g, :] = 0
        else:
            out[g, :] = part[g] * np.float32(1.0 / (1.0 + np.exp(sinks[g] - lse[g])))


@njit(cache=True)
def merge(parts, partial_out, partial_lse, sinks, out):  # type: ignore[no-untyped-def]
    """Merge the slots `parts` of partial_out [slots, G, D] and partial_lse [slots, G], in that order, into out [G, D]."""
    for g in range(out.shape[0]):
        top = -np.inf
        for slot in parts:
            top = max(top, partial_lse[slot, g])
        out[g, :] = 0
        if top == -np.inf:
            continue
        total = np.exp(sinks[g] - top)
        for slot in parts:
            total += np.exp(partial_lse[slot, g] - top)
        for slot in parts:
            weight = np.float32(np.exp(partial_lse[slot, g] - top) / total)
            if weight > 0:
                for d in range(out.shape[1]):
                    out[g, d] += weight * partial_out[slot, g, d]
