"""The segmented merge: combines the parts of each (row, KV head), in the plan's order.

PAT, merge; Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.triton.tiles import LOG2E, SEGMENT, size, wait_for_tasks, word


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["merge_indptr", "segments", "first_tokens"],
)
def merge_segments(
    part_out,
    part_lse,
    merge_indptr,
    segments,
    sinks,
    out,
    first_tokens,
    layer,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
    NQ: tl.constexpr,
):
    """Merge the segments of one layer by online softmax, BLOCK_PARTS at a time.

    `merge_indptr` [L + 1] bounds a layer's segments; slots count from the layer's first. The grid
    is (segments, ceil(NQ * G / BLOCK_G)). Rows have tokens as in `decode_tasks`. CHAINED: this
    launch overlaps the end of the tasks' launch.
    """
    GT: tl.constexpr = NQ * G
    begin = tl.load(merge_indptr + layer)
    end = tl.load(merge_indptr + layer + 1)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    if CHAINED:
        wait_for_tasks()
    for segment in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        record = segments + segment * size(SEGMENT)
        row = tl.load(record + word(SEGMENT, "row")).to(tl.int64)
        head = tl.load(record + word(SEGMENT, "head"))
        token = row + tl.zeros([BLOCK_G], tl.int64)
        merged = g < GT
        if NQ > 1:
            token = tl.load(first_tokens + row) + (g // G).to(tl.int64)
            merged = merged & (token < tl.load(first_tokens + row + 1))
        place = token * H + head
        first = tl.load(record + word(SEGMENT, "first_slot"))
        stop = tl.load(record + word(SEGMENT, "end_slot"))
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        for part in range(first, stop, BLOCK_PARTS):
            n = part + tl.arange(0, BLOCK_PARTS)
            at = n.to(tl.int64)[:, None] * GT + g[None, :]
            here = (n < stop)[:, None] & merged[None, :]
            lse = tl.load(part_lse + at, mask=here, other=float("-inf"))
            value = tl.load(
                part_out + at[:, :, None] * V + d[None, None, :],
                mask=here[:, :, None] & (d < V)[None, None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp2(lse - safe[None, :])
            shrink = tl.exp2(peak - safe)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * value, 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = new_peak
        if SINKS:
            sink = tl.load(sinks + head * G + g % G, mask=merged, other=0.0).to(tl.float32) * LOG2E
            safe = tl.where(peak == float("-inf"), sink, peak)
            total = total + tl.exp2(sink - safe)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (place * G + g % G)[:, None] * V + d[None, :],
            result.to(out.dtype.element_ty),
            mask=merged[:, None] & (d < V)[None, :],
        )
