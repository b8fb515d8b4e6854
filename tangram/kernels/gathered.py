"""Prefill attention over gathered entries: a head's past is copied out of its pages, its chunk behind it (Triton).

What lies end to end is loaded by tensor memory access, tile by tile, without following pages in the loop that
multiplies; heads of any lengths stay as they are. The copy is read as often as there are tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tangram.kernels.step import MOST_BYTES, PrefillRows
from tangram.kernels.tiles import LOG2E, multiply
from tangram.types import Int32, Int64

LEAST_TOKENS = 256  # of a row; what is read a few times only is not worth a copy
DTYPES = (torch.float16, torch.bfloat16)
TILE = 64  # entries, and queries; segments of the copy begin at multiples of it
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True, eq=False)
class Part:
    """Cells (row · H + head) that are computed together: the places `cells` of each layer's order.

    `queries` is the most of a row; `longest` [L] and `total` [L] are the entries of the longest segment and of all.
    """

    cells: slice
    queries: int
    longest: Int64
    total: Int64


@dataclass(frozen=True, eq=False)
class PrefillOrder:
    """In which order a step's cells are computed, and where their entries are gathered.

    `order` int32 [L, N · H]: by wave, its cells, counted from the wave's first row; `offsets` int32 [L, N · H]: by
    cell, where its segment begins. `gathered` and `paged` are the parts of each wave that are and that are not.
    """

    order: Int32
    offsets: Int32
    gathered: list[list[Part]]
    paged: list[list[Part]]

    @classmethod
    def of(cls, rows: PrefillRows, row_bytes: int, gathers: bool) -> PrefillOrder:
        """Those that read most come first; a row is gathered for its own length alone, if at all."""
        layers, count, heads, _ = rows.address.shape
        queries, keys = rows.spans[:, 1] - rows.spans[:, 0], rows.spans[:, 3] - rows.spans[:, 2]
        entries = (rows.address[..., 2] + keys[:, None]).astype(np.int64)
        segments = -(-entries // TILE) * TILE
        order, offsets = (np.zeros((layers, count * heads), np.int32) for _ in range(2))
        gathered, paged = list[list[Part]](), list[list[Part]]()
        for wave in rows.waves:
            numbers = np.arange(wave.start, wave.stop)
            wanted = gathers & (keys[wave] >= LEAST_TOKENS)
            begin, parts = wave.start * heads, (list[Part](), list[Part]())
            for kind, members in enumerate((numbers[wanted], numbers[~wanted])):
                for own in _within(members, segments.sum(2).max(0) * row_bytes, MOST_BYTES if kind == 0 else 0):
                    lengths = segments[:, own].reshape(layers, -1)
                    cells = ((own - wave.start)[:, None] * heads + np.arange(heads)).ravel()
                    places = slice(begin, begin + len(cells))
                    order[:, places] = cells[np.argsort(-lengths, axis=1, kind="stable")]
                    offsets[:, wave.start * heads + cells] = np.cumsum(lengths, axis=1) - lengths
                    part = Part(places, int(queries[own].max()), lengths.max(1), lengths.sum(1))
                    parts[kind].append(part)
                    begin = places.stop
            gathered.append(parts[0])
            paged.append(parts[1])
        return cls(order, offsets, gathered, paged)


def _within(rows: Int64, sizes: Int64, most: int) -> Iterator[Int64]:
    """`rows` in runs of at most `most` bytes together, or of one; all at once where `most` is 0."""
    begin = 0
    while begin < len(rows):
        fits = int(np.searchsorted(np.cumsum(sizes[rows[begin:]]), most, side="right")) if most else len(rows)
        yield rows[begin : begin + max(fits, 1)]
        begin += max(fits, 1)


def serves(pool: Tensor) -> bool:
    """Whether entries of this pool are gathered: for that the device needs tensor memory access."""
    able = not pool.is_cuda or torch.cuda.get_device_capability(pool.device) >= (9, 0)
    return able and pool.dtype in DTYPES and pool.shape[-1] in (64, 128)


@triton.jit(do_not_specialize_on_alignment=["tables", "address", "spans", "order", "offsets"])
def gather_segments(
    k, v, pool, tables, address, spans, order, offsets, gathered_k, gathered_v, stride_k, stride_k_head, stride_v,
    stride_v_head, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy each cell's past and chunk to its segment of gathered_k and gathered_v [entries, D], zeros behind them.

    Grid (tiles of the longest segment, cells); `address`, `spans` as in `prefill.py`.
    """
    cell = tl.load(order + tl.program_id(1))
    row = cell // H
    head = cell % H
    past = tl.load(address + cell * 3 + 2)
    begin = tl.load(spans + row * 5 + 2)
    total = past + tl.load(spans + row * 5 + 3) - begin
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < total:
        d = tl.arange(0, D)
        old = (n < past)[:, None]
        new = ((n >= past) & (n < total))[:, None]
        page = tl.load(tables + tl.load(address + cell * 3) + n // P, mask=n < past, other=0).to(tl.int64)
        column = tl.load(address + cell * 3 + 1)
        place = pool + ((page * HP + column) * (2 * P * D) + (n % P) * D)[:, None] + d[None, :]
        own = (begin + n - past).to(tl.int64)[:, None]
        target = (tl.load(offsets + cell) + n).to(tl.int64)[:, None] * D + d[None, :]
        fresh = tl.load(k + own * stride_k + head * stride_k_head + d[None, :], mask=new, other=0.0)
        tl.store(gathered_k + target, tl.where(old, tl.load(place, mask=old, other=0.0), fresh))
        fresh = tl.load(v + own * stride_v + head * stride_v_head + d[None, :], mask=new, other=0.0)
        tl.store(gathered_v + target, tl.where(old, tl.load(place + P * D, mask=old, other=0.0), fresh))


@triton.jit
def _absorb(acc, peak, total, query, keys, values, at, offset, last, scaling, MASKED: tl.constexpr, TILE: tl.constexpr):
    """One tile of a segment; `last` [M] is the last entry that each query sees."""
    k = keys.load([offset + at, 0])
    scores = multiply(query, tl.trans(k), tl.zeros([query.shape[0], TILE], tl.float32))
    if MASKED:
        n = at + tl.arange(0, TILE)
        scores = tl.where(n[None, :] > last[:, None], float("-inf"), scores)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * (scaling * LOG2E))
    weights = tl.exp2(scores * (scaling * LOG2E) - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    v = values.load([offset + at, 0])
    acc = multiply(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize_on_alignment=["address", "spans", "order", "offsets"])
def attend_segments(
    q, keys, values, address, spans, order, offsets, out, scaling, stride_q, stride_q_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each tile of queries against its segment, causally; grid (tiles of the longest row, cells · G)."""
    cell = tl.load(order + tl.program_id(1) // G)
    row = cell // H
    q_begin = tl.load(spans + row * 5)
    queries = tl.load(spans + row * 5 + 1) - q_begin
    # The last tiles see the most entries: they start first.
    tile = tl.cdiv(queries, TILE) - 1 - tl.program_id(0)
    if tile >= 0:
        query_head = (cell % H) * G + tl.program_id(1) % G
        lead = tl.load(spans + row * 5 + 3) - tl.load(spans + row * 5 + 2) - queries
        before = tl.load(address + cell * 3 + 2) + lead
        offset = tl.load(offsets + cell)
        m = tile * TILE + tl.arange(0, TILE)
        d = tl.arange(0, D)
        token = (q_begin + m).to(tl.int64)[:, None]
        wanted = (m < queries)[:, None]
        query = tl.load(q + token * stride_q + query_head * stride_q_head + d[None, :], mask=wanted, other=0.0)
        acc = tl.zeros([TILE, D], tl.float32)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        last = before + m
        seen_by_all = (before + tile * TILE + 1) // TILE * TILE
        for at in range(0, seen_by_all, TILE):
            acc, peak, total = _absorb(acc, peak, total, query, keys, values, at, offset, last, scaling, False, TILE)
        for at in range(seen_by_all, before + tl.minimum(tile * TILE + TILE, queries), TILE):
            acc, peak, total = _absorb(acc, peak, total, query, keys, values, at, offset, last, scaling, True, TILE)
        place = out + (token * (H * G) + query_head) * D + d[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


def room(part: Part, layer: int, dim: int) -> int:
    """Elements that the gathered keys, or values, of one layer take."""
    return int(part.total[layer]) * dim


def attend(
    q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, address: Tensor, spans: Tensor, order: Tensor,
    offsets: Tensor, gathered: Sequence[Tensor], part: Part, out: Tensor, *, layer: int, scaling: float,
) -> None:  # fmt: skip
    """Attention of the cells `order` of a part: q [T, Q, D], k, v [T', H, D] → out [T, Q, D], those rows of it.

    `address` int32 [rows, H, 3] and `spans` int32 [rows, 5] are a wave's, `offsets` int32 [rows · H] too. `gathered`
    are two tensors with `room`, which are overwritten. Otherwise the contract of `prefill.prefill`.
    """
    dim, heads, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    total = int(part.total[layer])
    buffers = [buffer[: total * dim].view(total, dim) for buffer in gathered]
    gather_segments[(triton.cdiv(int(part.longest[layer]), TILE), len(order))](
        k, v, pool, tables, address, spans, order, offsets, *buffers, *k.stride()[:2], *v.stride()[:2],
        H=heads, D=dim, HP=pool.shape[1], P=pool.shape[3], TILE=TILE, num_warps=4,
    )  # fmt: skip
    keys, values = (TensorDescriptor(buffer, [total, dim], [dim, 1], [TILE, dim]) for buffer in buffers)
    attend_segments[(triton.cdiv(part.queries, TILE), len(order) * group)](
        q, keys, values, address, spans, order, offsets, out, scaling, *q.stride()[:2],
        H=heads, G=group, D=dim, TILE=TILE, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
