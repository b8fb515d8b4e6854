"""Prefill attention on the GPU: a chunk attends to its sequence's pages, then causally to itself.

One Triton launch computes the chunks of several requests. Every program serves one tile of new
tokens of one query head, with online softmax in float32. A row of few tokens behind a long past has
too few tiles to fill the card: several programs share the past of a tile then, and a second launch
merges what they found (FlashDecoding). A row's result depends on its own tokens and past alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.e4m3 import widen
from tangram.kernels.triton.stored import LayerRows, StoredPool
from tangram.kernels.triton.tiles import LOG2E, multiply, soft_cap, take_part
from tangram.kernels.triton.tiling import Operands, Tile, fit_tile

# Fastest on Hopper; the wide tile is for heads of more than 128 dimensions.
TILE, WIDE_TILE = (Tile(64), Tile(64, entries=32))
# Of a row that is split: the most programs of a query head, and the entries of a past for each.
SLOTS, SPLIT_ENTRIES = 8, 1024
MOST_CELLS = 64  # of a launch that splits rows: with G 4 and D 128 its parts take 64 MiB
MERGED_QUERIES = 16  # of a program that merges


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


@triton.jit
def _count_splits(tiles, past, SLOTS: tl.constexpr, LEAST: tl.constexpr):
    """How many programs share the past of each of a row's tiles."""
    return tl.maximum(1, tl.minimum(SLOTS // tl.maximum(tiles, 1), tl.cdiv(past, LEAST)))


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
    parts,
    part_lse,
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
    SLOTS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Grid (tiles of the longest row, or SLOTS if there are more; rows · Q heads).

    `spans` [rows, 5]: queries [begin, end) and keys [begin, end) in the flattened batch, and the
    position of the first key. The queries belong to a row's last keys. `address` [rows, H, 3]:
    table offset, column, past length. `order` [rows · H] lists the (row, head) cells; those that
    read most start first. Where SLOTS > 1, programs of a row that is split leave `parts` [rows · Q,
    SLOTS, BLOCK_M, D] and `part_lse` for `merge_splits`, in the order of the cells.
    """
    cell = tl.load(order + tl.program_id(1) // G)
    part = cell // H
    head = cell % H
    q_begin = tl.load(spans + part * 5)
    q_end = tl.load(spans + part * 5 + 1)
    k_begin = tl.load(spans + part * 5 + 2)
    k_end = tl.load(spans + part * 5 + 3)
    start = tl.load(spans + part * 5 + 4)
    record = address + cell * 3
    past = tl.load(record + 2)
    tiles = tl.cdiv(q_end - q_begin, BLOCK_M)
    splits = 1
    if SLOTS > 1:
        splits = _count_splits(tiles, past, SLOTS, LEAST)
    split = tl.program_id(0) % splits
    # The last tiles see the most keys, so they start first.
    tile = tiles - 1 - tl.program_id(0) // splits
    if tile >= 0:
        query_head = head * G + tl.program_id(1) % G
        table = tl.load(record)
        column = tl.load(record + 1)
        share = tl.cdiv(tl.cdiv(past, BLOCK_N), splits) * BLOCK_N
        past_begin = split * share
        past_end = tl.minimum(past, past_begin + share)
        last = split == splits - 1  # takes the row's own entries, too
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
        begin = past_begin
        if WINDOW:
            # Pages that no query of the tile sees may have been released: they are not read at all.
            begin = tl.maximum(0, start + lead + first - window + 1)
        else:
            # Whole tiles that every query sees need no mask; the rest of the past does.
            begin = tl.maximum(past_begin, past_end // BLOCK_N * BLOCK_N)
            for at in range(past_begin, begin, BLOCK_N):
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
        for at in range(begin, past_end, BLOCK_N):
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
        own_end = tl.where(last, tl.minimum(lead + first + BLOCK_M, k_end - k_begin), 0)
        own_k = k + head * stride_k_head + k_begin.to(tl.int64) * stride_k
        own_v = v + head * stride_v_head + k_begin.to(tl.int64) * stride_v
        if WINDOW:
            own_begin = tl.maximum(0, lead + first - window + 1)
        else:
            own_begin = tl.where(last, (lead + first) // BLOCK_N * BLOCK_N, 0)
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
            total = total + tl.where(last, tl.exp2(sink - peak), 0.0)
        divisor = tl.where(total > 0, total, 1.0)
        result = acc / divisor[:, None]
        if SLOTS > 1:
            slot = tl.program_id(1).to(tl.int64) * SLOTS + tile * splits + split
            at = slot * BLOCK_M + tl.arange(0, BLOCK_M)
            shared = wanted & (splits > 1)
            tl.store(parts + at[:, None] * D + d[None, :], result, mask=shared)
            lse = peak + tl.log2(divisor)  # -inf where a share is empty
            tl.store(part_lse + at, lse, mask=(m < q_end - q_begin) & (splits > 1))
            wanted = wanted & (splits == 1)
        place = out + (token[:, None] * (H * G) + query_head) * D + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["address", "spans", "order"])
def merge_splits(
    parts,
    part_lse,
    address,
    spans,
    order,
    out,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLOTS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Merge the parts that `prefill_tiles` left of rows that were split.

    Grid (BLOCK_R queries each of up to SLOTS / 2 tiles, rows · Q heads).
    """
    cell = tl.load(order + tl.program_id(1) // G)
    part = cell // H
    q_begin = tl.load(spans + part * 5)
    queries = tl.load(spans + part * 5 + 1) - q_begin
    splits = _count_splits(tl.cdiv(queries, BLOCK_M), tl.load(address + cell * 3 + 2), SLOTS, LEAST)
    m = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (splits > 1) & (tl.program_id(0) * BLOCK_R < queries):
        d = tl.arange(0, BLOCK_D)
        wanted = (m < queries)[:, None] & (d < D)[None, :]
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        first = tl.program_id(1).to(tl.int64) * SLOTS + m // BLOCK_M * splits
        for split in range(0, splits):
            at = (first + split) * BLOCK_M + m % BLOCK_M
            lse = tl.load(part_lse + at, mask=m < queries, other=float("-inf"))
            value = tl.load(parts + at[:, None] * D + d[None, :], mask=wanted, other=0.0)
            acc, peak, total = take_part(acc, peak, total, lse, value)
        query_head = (cell % H) * G + tl.program_id(1) % G
        place = ((q_begin + m).to(tl.int64)[:, None] * (H * G) + query_head) * D + d[None, :]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)


def tile_of(operands: Operands, card: Card) -> Tile:
    """The tile of a program on `card`."""
    return fit_tile(TILE if operands.head_dim <= 128 else WIDE_TILE, operands, card)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: StoredPool,
    rows: LayerRows,
    order: Tensor,
    rule: AttentionRule,
    *,
    out: Tensor | None = None,
    split_entries: int = SPLIT_ENTRIES,
) -> Tensor:
    """Attention of the new tokens of several requests: q [T, Q, D] → [T, Q, D], in q's dtype.

    k, v are [T', H, D]. `order` int32 [cells] lists the cells row · H + head that are computed, in
    their order. Otherwise the contract of `reference.prefill`. Parts of `out` without span or cell
    are unchanged. Without a window, the past of a row of few tiles is split among programs, one for
    `split_entries` entries or more.
    """
    heads, dim = k.shape[1], q.shape[2]
    group = q.shape[1] // heads
    out = q.new_empty(q.shape) if out is None else out
    block_dim = triton.next_power_of_2(dim)
    # Depends on head dim and card alone, so that a row is computed alike in any batch.
    operands = Operands(block_dim, q.element_size(), hops=1, widens=pool.scales is not None)
    tile = tile_of(operands, pool.card)
    numbers = (rows.layer, rule.scaling, rule.softcap or 1.0, rule.window or 0)
    launch = _Launch(
        (
            (q, k, v, pool.entries, rows.tables, rows.address, rows.spans),
            (pool.scales, rule.sinks),
            out,
        ),
        (*numbers, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        {"H": heads, "G": group, "D": dim, "BLOCK_M": tile.queries, "BLOCK_D": block_dim},
        tile,
        rule.window is not None,
        rule.softcap is not None,
    )
    tiles = triton.cdiv(rows.longest, tile.queries)
    if rule.window is None and 2 * triton.cdiv(rows.shortest, tile.queries) <= SLOTS:
        launch.run_split(order, tiles, split_entries)
    else:
        launch.run(order, tiles, (out, out), 1, split_entries)
    return out


@dataclass(frozen=True)
class _Launch:
    """What all launches of a call have.

    `tensors` are the inputs, the scales and sinks if there are any, and the output. `numbers` are
    the arguments behind them, `shape` those that both kernels are compiled for.
    """

    tensors: tuple[tuple[Tensor, ...], tuple[Tensor | None, Tensor | None], Tensor]
    numbers: tuple[int | float, ...]
    shape: dict[str, int]
    tile: Tile
    windowed: bool
    capped: bool

    def run(
        self, cells: Tensor, programs: int, parts: tuple[Tensor, Tensor], slots: int, least: int
    ) -> None:
        """Compute `cells` by up to `programs` programs of each query head."""
        inputs, (scales, sinks), out = self.tensors
        pool = inputs[3]
        prefill_tiles[(programs, self.shape["G"] * len(cells))](
            *(*inputs, cells, out if scales is None else scales, out if sinks is None else sinks),
            *(out, *parts, *self.numbers),
            **self.shape,
            HP=pool.shape[1],
            P=pool.shape[3],
            BLOCK_N=self.tile.entries,
            WINDOW=self.windowed,
            SOFTCAP=self.capped,
            SINKS=sinks is not None,
            SCALED=scales is not None,
            SLOTS=slots,
            LEAST=least,
            num_warps=self.tile.warps,
            num_stages=self.tile.stages,
        )

    def run_split(self, order: Tensor, tiles: int, least: int) -> None:
        """The same for the cells `order` of rows that may be split; parts are merged."""
        (*_, address, spans), _, out = self.tensors
        group, dim, queries = (self.shape[name] for name in ("G", "D", "BLOCK_M"))
        places = group * min(MOST_CELLS, len(order)) * SLOTS * queries
        parts, part_lse = (
            torch.empty(places * size, dtype=torch.float32, device=out.device) for size in (dim, 1)
        )
        merges = min(SLOTS // 2, tiles) * queries // MERGED_QUERIES
        for cells in torch.split(order, MOST_CELLS):
            self.run(cells, max(tiles, SLOTS), (parts, part_lse), SLOTS, least)
            merge_splits[(merges, group * len(cells))](
                *(parts, part_lse, address, spans, cells, out),
                **self.shape,
                BLOCK_R=MERGED_QUERIES,
                SLOTS=SLOTS,
                LEAST=least,
            )
