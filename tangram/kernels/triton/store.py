"""Writes into pages on the GPU: a row's newest entry, all new entries, or those kept of a chunk.

Triton. S is 2 where an entry is a key and a value, 1 where it is a latent, of which v is a part.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tangram.kernels.interface import Ranking
from tangram.kernels.triton.e4m3 import to_e4m3
from tangram.kernels.triton.stored import LayerRows, StoredPool
from tangram.kernels.triton.tiles import ADDRESS, size, word
from tangram.types import FP8_MAX


@triton.jit
def _convert(x, scale, dtype: tl.constexpr, LIMIT: tl.constexpr, SCALED: tl.constexpr):
    """`x` as a pool of `dtype` stores it: divided by its scale and clamped to the pool's range."""
    if SCALED:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -LIMIT), LIMIT)
        if dtype == tl.uint8:
            x = to_e4m3(x)
    return x.to(dtype)


@triton.jit
def _write(
    k,
    v,
    target,
    scale,
    here,
    S: tl.constexpr,
    BEHIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Store the keys at `k` at `target`, and the values at `v`, if any, so many elements `BEHIND`.

    Their scales are at `scale`.
    """
    dtype: tl.constexpr = target.dtype.element_ty
    k_scale = 1.0
    v_scale = 1.0
    if SCALED:
        k_scale = tl.load(scale)
        v_scale = tl.load(scale + 1)
    tl.store(target, _convert(tl.load(k, mask=here), k_scale, dtype, LIMIT, SCALED), mask=here)
    if S == 2:
        values = _convert(tl.load(v, mask=here), v_scale, dtype, LIMIT, SCALED)
        tl.store(target + BEHIND, values, mask=here)


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["tables", "lengths", "address", "first_tokens"],
)
def append_entries(
    k,
    v,
    pool,
    tables,
    lengths,
    address,
    first_tokens,
    scales,
    layer,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    NQ: tl.constexpr,
):
    """Write k, v [T, H, D] so that a row's last token is at index length - 1, if that is not -1.

    Rows have tokens as in `decode_tasks`. `address` is [L, R, H, 3]; grid (R, H, NQ).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cell = (layer.to(tl.int64) * tl.num_programs(0) + row) * H + head
    record = address + cell * size(ADDRESS)
    index = tl.load(lengths + tl.load(record + word(ADDRESS, "length_index"))) - 1
    token = row
    if NQ > 1:
        token = tl.load(first_tokens + row).to(tl.int64) + tl.program_id(2)
        behind = tl.load(first_tokens + row + 1) - 1 - token.to(tl.int32)
        index = tl.where(behind >= 0, index - behind, -1)
    table = tl.load(record + word(ADDRESS, "table"))
    page = tl.load(tables + table + tl.maximum(index, 0) // P).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    here = d < tl.where(index >= 0, D, 0)
    column = tl.load(record + word(ADDRESS, "column"))
    place = pool + (page * HP + column) * (S * P * D) + (index % P) * D + d
    _write(
        k + token * stride_k + head * stride_k_head + d,
        v + token * stride_v + head * stride_v_head + d,
        place,
        scales + (layer * H + head) * 2,
        *(here, S, P * D, LIMIT, SCALED),
    )


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["tables", "address", "spans", "kept"],
)
def store_rows(
    k,
    v,
    pool,
    tables,
    address,
    spans,
    kept,
    scales,
    layer,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write rows of k, v [T, H, D] after their past, where a head keeps all.

    `spans` [rows, 5] and `address` [rows, H, 3] as in `prefill.py`, `kept` [rows, H]. Grid (tiles
    of the longest row, H, rows).
    """
    row = tl.program_id(2)
    place = row * H + tl.program_id(1)
    begin = tl.load(spans + row * 5 + 2)
    count = tl.load(spans + row * 5 + 3) - begin
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(kept + place) == count:
        d = tl.arange(0, BLOCK_D)
        here = (n < count)[:, None] & (d < D)[None, :]
        index = tl.load(address + place * 3 + 2) + n
        page = tl.load(
            tables + tl.load(address + place * 3) + index // P, mask=n < count, other=0
        ).to(tl.int64)
        entry = (page * HP + tl.load(address + place * 3 + 1)) * (S * P * D) + (index % P) * D
        target = pool + entry[:, None] + d[None, :]
        source = (begin + n).to(tl.int64)[:, None]
        head = tl.program_id(1)
        _write(
            k + source * stride_k + head * stride_k_head + d[None, :],
            v + source * stride_v + head * stride_v_head + d[None, :],
            target,
            scales + (layer * H + head) * 2,
            *(here, S, P * D, LIMIT, SCALED),
        )


@triton.jit
def _order_scores(scores, valid):
    """Scores as int32 in the same order.

    NaN is below all scores, -0.0 equals 0.0, and places that are no tokens are lowest.
    """
    x = tl.where(scores == 0.0, 0.0, scores)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(scores != scores, -2147483647, key)
    return tl.where(valid, key, -2147483648)


@triton.jit
def _load_keys(scores, c, C: tl.constexpr, sinks, window):
    """Ordered keys of tokens `c`; the first `sinks` and the last `window` are above all others."""
    valid = c < C
    x = tl.load(scores + c, mask=valid, other=0.0)
    forced = valid & ((c < sinks) | (c >= C - window))
    return _order_scores(tl.where(forced, float("inf"), x), valid)


@triton.jit(
    do_not_specialize=["layer", "sinks", "window"],
    do_not_specialize_on_alignment=["tables", "address", "spans", "kept", "mask"],
)
def seal_chunk(
    scores,
    k,
    v,
    pool,
    tables,
    address,
    spans,
    kept,
    scales,
    mask,
    layer,
    sinks,
    window,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_mask,
    C: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    REST: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Select, gather and pack chunks of one layer.

    Kept entries go, in their order, to the head's next pages. The best stay as in `select.keep`:
    higher first, equal ones by lower index, NaN last. With REST the others follow. With RECORD
    `mask` uint8 [N, H, C] tells which stay. Shapes: `scores` float32 [N, H, C]; k, v [N · C, H, D];
    `address` [N, H, 3], which is table offset, column, first index; `spans` [N, 5] as in
    `prefill.py`. `kept` [N, H] is how many stay. The grid is (N · H, ceil(C / BLOCK)): each program
    finds its head's threshold by itself, then moves its own tokens.
    """
    place = tl.program_id(0)
    chunk = place // H
    head = place % H
    wanted = tl.load(kept + place)
    row = scores + place * C
    sinks = tl.where(tl.load(spans + chunk * 5 + 4) == 0, sinks, 0)
    c = tl.arange(0, BLOCK_C)
    key = _load_keys(row, c, C, sinks, window)
    low = tl.min(key, 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    for _ in range(33):
        middle = (low + high + 1) >> 1
        enough = tl.sum((key >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    ties = wanted - tl.sum((key > low).to(tl.int32), 0)
    first = tl.program_id(1) * BLOCK
    before = c < first
    better_before = tl.sum((before & (key > low)).to(tl.int32), 0)
    equal_before = tl.sum((before & (key == low)).to(tl.int32), 0)
    n = first + tl.arange(0, BLOCK)
    own_key = _load_keys(row, n, C, sinks, window)
    equal = (own_key == low).to(tl.int32)
    rank = equal_before + tl.cumsum(equal, 0) - equal
    stays = (n < C) & ((own_key > low) | ((own_key == low) & (rank < ties)))
    if RECORD:
        noted = mask + chunk.to(tl.int64) * stride_mask + head * C + n
        tl.store(noted, stays.to(tl.uint8), mask=n < C)
    moved = stays.to(tl.int32)
    stay_before = better_before + tl.minimum(equal_before, ties) + tl.cumsum(moved, 0) - moved
    stored = stays
    rank_stored = stay_before
    if REST:
        stored = n < C
        rank_stored = tl.where(stays, stay_before, wanted + n - stay_before)
    index = tl.load(address + place * 3 + 2) + rank_stored
    page = tl.load(tables + tl.load(address + place * 3) + index // P, mask=stored, other=0).to(
        tl.int64
    )
    d = tl.arange(0, BLOCK_D)
    entry = (page * HP + tl.load(address + place * 3 + 1)) * (S * P * D) + (index % P) * D
    target = pool + entry[:, None] + d[None, :]
    here = stored[:, None] & (d < D)[None, :]
    source = (chunk * C + n).to(tl.int64)[:, None]
    _write(
        k + source * stride_k + head * stride_k_head + d[None, :],
        v + source * stride_v + head * stride_v_head + d[None, :],
        target,
        scales + (layer * H + head) * 2,
        *(here, S, P * D, LIMIT, SCALED),
    )


def append(
    k: Tensor,
    v: Tensor,
    pool: StoredPool,
    tables: Tensor,
    lengths: Tensor,
    address: Tensor,
    layer: int,
    first_tokens: Tensor | None = None,
    queries: int = 1,
) -> None:
    """`reference.append` for one layer: k, v [T, H, D].

    `address` int32 [L, R, H, 3] are the words of `ADDRESS`. Row r has the tokens
    first_tokens[r] to first_tokens[r + 1], up to `queries`; None means the token r.
    """
    heads, rows = k.shape[1], address.shape[1]
    append_entries[(rows, heads, queries)](
        *(k, v, pool.entries, tables, lengths, address),
        first_tokens if first_tokens is not None else address,
        pool.scales if pool.scales is not None else k,
        *(layer, *k.stride()[:2], *v.stride()[:2]),
        **_forms(k, pool),
        NQ=queries,
        num_warps=1,
    )


def store(k: Tensor, v: Tensor, pool: StoredPool, rows: LayerRows, kept: Tensor) -> None:
    """`reference.store` for several rows of k, v [T, H, D], for heads that keep all of a row.

    `kept` is int32 [N, H].
    """
    count, heads = kept.shape
    store_rows[(triton.cdiv(rows.longest, 32), heads, count)](
        *(k, v, pool.entries, rows.tables, rows.address, rows.spans, kept),
        pool.scales if pool.scales is not None else k,
        *(rows.layer, *k.stride()[:2], *v.stride()[:2]),
        **_forms(k, pool),
        BLOCK=32,
        num_warps=4,
    )


def seal(
    ranking: Ranking,
    k: Tensor,
    v: Tensor,
    pool: StoredPool,
    rows: LayerRows,
    kept: Tensor,
    *,
    keeps_rest: bool = False,
    mask: Tensor | None = None,
) -> None:
    """Write the `kept` [N, H] best of the C entries of each of N chunks to each head's next pages.

    With `keeps_rest` the others follow in the pages behind them. k, v are [N · C, H, D]. `mask`
    uint8 [N, H, C], if given, gets a 1 for each of the best entries and a 0 for the others.
    """
    chunks, heads, tokens = ranking.scores.shape
    block = min(64, triton.next_power_of_2(tokens))
    seal_chunk[(chunks * heads, triton.cdiv(tokens, block))](
        *(ranking.scores.contiguous(), k, v),
        *(pool.entries, rows.tables, rows.address, rows.spans, kept),
        pool.scales if pool.scales is not None else k,
        mask if mask is not None else kept,
        *(rows.layer, ranking.sinks, ranking.window, *k.stride()[:2], *v.stride()[:2]),
        mask.stride(0) if mask is not None else 0,
        **_forms(k, pool),
        C=tokens,
        BLOCK_C=triton.next_power_of_2(tokens),
        BLOCK=block,
        REST=keeps_rest,
        RECORD=mask is not None,
        num_warps=4,
    )


def _forms(k: Tensor, pool: StoredPool) -> dict[str, float]:
    """What all kernels here are compiled for: keys [T, H, D] and `pool`."""
    _, heads_per_page, vectors, page_tokens, dim = pool.entries.shape
    return {
        **{"H": k.shape[1], "D": dim, "S": vectors, "HP": heads_per_page, "P": page_tokens},
        **{
            "BLOCK_D": triton.next_power_of_2(dim),
            "LIMIT": FP8_MAX,
            "SCALED": pool.scales is not None,
        },
    }
