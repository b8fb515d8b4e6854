"""Prefill attention on the GPU: a chunk attends to its sequence's pages, then causally to itself.

One Triton launch computes the chunks of several requests. Every program serves one tile of new
tokens of one query head, with online softmax in float32. Its result depends on its own request
alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tangram.kernels.card import Card
from tangram.kernels.e4m3 import widen
from tangram.kernels.tiles import LOG2E, multiply, soft_cap
from tangram.kernels.tiling import Operands, Tile, fit_tile

# Fastest on Hopper; the wide tile is for heads of more than 128 dimensions.
TILE, WIDE_TILE = (Tile(64), Tile(64, entries=32))


@triton.jit
def _absorb(
    acc,
    peak,
    total,
    query,
    k,
    v,
    hidden,
    scaling,
    softcap,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Add one tile of keys and values [N, D]; `hidden` [M, N] where MASKED."""
    scores = multiply(query, tl.trans(k), tl.zeros([query.shape[0], k.shape[0]], tl.float32))
    grow = scaling * LOG2E
    if SOFTCAP:
        scores = soft_cap(scores, scaling, softcap)
        grow = 1.0
    if MASKED:
        scores = tl.where(hidden, float("-inf"), scores)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * grow)
    # A whole tile may be hidden from a query.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(scores * grow - safe[:, None])
    shrink = tl.exp2(peak - safe)
    acc = multiply(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def _load_dimensions(place, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, BLOCK_D] from `place`, zero beyond the head's dimensions."""
    if BLOCK_D == D:
        return tl.load(place)
    return tl.load(place, mask=(d < D)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["tables", "address", "spans", "order"],
)
def prefill_tiles(
    q,
    k,
    v,
    pool,
    tables,
    address,
    spans,
    order,
    scales,
    sinks,
    out,
    layer,
    scaling,
    softcap,
    window,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid (tiles of the longest row, rows · Q heads).

    `spans` [rows, 5]: queries [begin, end) and keys [begin, end) in the flattened batch, and the
    position of the first key. The queries belong to a row's last keys. `address` [rows, H, 3]:
    table offset, column, past length. `order` [rows · H] lists the (row, head) cells; those that
    read most start first.
    """
    cell = tl.load(order + tl.program_id(1) // G)
    part = cell // H
    head = cell % H
    q_begin = tl.load(spans + part * 5)
    q_end = tl.load(spans + part * 5 + 1)
    k_begin = tl.load(spans + part * 5 + 2)
    k_end = tl.load(spans + part * 5 + 3)
    start = tl.load(spans + part * 5 + 4)
    # The last tiles see the most keys, so they start first.
    tile = tl.cdiv(q_end - q_begin, BLOCK_M) - 1 - tl.program_id(0)
    if tile >= 0:
        query_head = head * G + tl.program_id(1) % G
        record = address + cell * 3
        table = tl.load(record)
        column = tl.load(record + 1)
        past = tl.load(record + 2)
        lead = (k_end - k_begin) - (q_end - q_begin)
        first = tile * BLOCK_M
        m = first + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        wanted = (m < q_end - q_begin)[:, None] & (d < D)[None, :]
        token = (q_begin + m).to(tl.int64)
        query = tl.load(
            q + token[:, None] * stride_q + query_head * stride_q_head + d[None, :],
            mask=wanted,
            other=0.0,
        )
        past_query = query
        if SCALED:  # a power of two: exact
            k_scale = tl.load(scales + (layer * H + head) * 2)
            past_query = (query.to(tl.float32) * k_scale).to(query.dtype)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        begin = 0
        if WINDOW:
            # Pages that no query of the tile sees may have been released: they are not read at all.
            begin = tl.maximum(0, start + lead + first - window + 1)
        else:
            # Whole tiles that every query sees need no mask; the rest of the past does.
            begin = past // BLOCK_N * BLOCK_N
            for at in range(0, begin, BLOCK_N):
                n = at + tl.arange(0, BLOCK_N)
                page = tl.load(tables + table + n // P).to(tl.int64)
                place = (
                    pool + ((page * HP + column) * (2 * P * D) + (n % P) * D)[:, None] + d[None, :]
                )
                keys = _load_dimensions(place, d, D, BLOCK_D)
                values = _load_dimensions(place + P * D, d, D, BLOCK_D)
                if SCALED:
                    keys, values = widen(keys, query.dtype), widen(values, query.dtype)
                acc, peak, total = _absorb(
                    acc, peak, total, past_query, keys, values, 0, scaling, softcap, False, SOFTCAP
                )
        for at in range(begin, past, BLOCK_N):
            n = at + tl.arange(0, BLOCK_N)
            page = tl.load(tables + table + n // P, mask=n < past, other=0).to(tl.int64)
            place = pool + ((page * HP + column) * (2 * P * D) + (n % P) * D)[:, None] + d[None, :]
            here = (n < past)[:, None] & (d < D)[None, :]
            hidden = (n >= past)[None, :] & (m >= 0)[:, None]
            if WINDOW:
                hidden = hidden | (n[None, :] <= (start + lead + m)[:, None] - window)
            keys = tl.load(place, mask=here, other=0.0)
            values = tl.load(place + P * D, mask=here, other=0.0)
            if SCALED:
                keys, values = widen(keys, query.dtype), widen(values, query.dtype)
            acc, peak, total = _absorb(
                acc, peak, total, past_query, keys, values, hidden, scaling, softcap, True, SOFTCAP
            )
        if SCALED:
            acc = acc * tl.load(scales + (layer * H + head) * 2 + 1)
        own_end = tl.minimum(lead + first + BLOCK_M, k_end - k_begin)
        own_k = k + head * stride_k_head + k_begin.to(tl.int64) * stride_k
        own_v = v + head * stride_v_head + k_begin.to(tl.int64) * stride_v
        if WINDOW:
            own_begin = tl.maximum(0, lead + first - window + 1)
        else:
            own_begin = (lead + first) // BLOCK_N * BLOCK_N
            for at in range(0, own_begin, BLOCK_N):
                n = (at + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
                keys = _load_dimensions(own_k + n * stride_k + d[None, :], d, D, BLOCK_D)
                values = _load_dimensions(own_v + n * stride_v + d[None, :], d, D, BLOCK_D)
                acc, peak, total = _absorb(
                    acc, peak, total, query, keys, values, 0, scaling, softcap, False, SOFTCAP
                )
        for at in range(own_begin, own_end, BLOCK_N):
            n = at + tl.arange(0, BLOCK_N)
            here = (n < own_end)[:, None] & (d < D)[None, :]
            hidden = (n[None, :] > (lead + m)[:, None]) | (n >= own_end)[None, :]
            if WINDOW:
                hidden = hidden | (n[None, :] <= (lead + m)[:, None] - window)
            source = n.to(tl.int64)[:, None]
            keys = tl.load(own_k + source * stride_k + d[None, :], mask=here, other=0.0)
            values = tl.load(own_v + source * stride_v + d[None, :], mask=here, other=0.0)
            acc, peak, total = _absorb(
                acc, peak, total, query, keys, values, hidden, scaling, softcap, True, SOFTCAP
            )
        if SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
            total = total + tl.exp2(sink - peak)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = out + (token[:, None] * (H * G) + query_head) * D + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=wanted)


def tile_of(operands: Operands, card: Card) -> Tile:
    """The tile of a program on `card`."""
    return fit_tile(TILE if operands.head_dim <= 128 else WIDE_TILE, operands, card)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    address: Tensor,
    spans: Tensor,
    order: Tensor,
    *,
    layer: int,
    longest: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    card: Card | None = None,
) -> Tensor:
    """Attention of the new tokens of several requests: q [T, Q, D] → [T, Q, D], in q's dtype.

    k, v are [T', H, D]. `spans` int32 [rows, 5]: the requests' queries [begin, end) in q, keys
    [begin, end) in k, and the position of their first key. `address` int32 [rows, H, 3]: each
    head's table offset, column and past length in the pool. `longest` is the most queries of a row.
    `order` int32 [cells] lists the cells row · H + head that are computed, in their order.
    Otherwise the contract of `reference.prefill`. Parts of `out` without span or cell are
    unchanged. `card` None is the pool's own.
    """
    query_heads, dim = q.shape[1:]
    heads = k.shape[1]
    out = q.new_empty(q.shape) if out is None else out
    block_dim = triton.next_power_of_2(dim)
    # Depends on head dim and card alone, so that a row is computed alike in any batch.
    operands = Operands(block_dim, q.element_size(), hops=1, widens=scales is not None)
    tile = tile_of(operands, card or Card.of(pool.device))
    grid = (triton.cdiv(longest, tile.queries), query_heads // heads * len(order))
    tensors = (q, k, v, pool, tables, address, spans, order)
    scale, sink = (scales if scales is not None else k), (sinks if sinks is not None else q)
    numbers = (layer, scaling, softcap or 1.0, window or 0)
    prefill_tiles[grid](
        *(*tensors, scale, sink, out, *numbers),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        H=heads,
        G=query_heads // heads,
        D=dim,
        HP=pool.shape[1],
        P=pool.shape[3],
        BLOCK_M=tile.queries,
        BLOCK_N=tile.entries,
        BLOCK_D=block_dim,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SCALED=scales is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
