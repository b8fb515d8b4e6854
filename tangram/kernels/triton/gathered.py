"""Prefill attention over gathered entries (Triton): pasts are copied out of their pages.

New chunks follow them in the copy. Contiguous entries are loaded by tensor memory access, tile by
tile, without page lookups in the loop that multiplies. Heads may have any lengths. The copy is read
once for each tile of queries. Rows of one sequence read one copy of its past, each up to its own
length. FP8 entries are widened and scaled on the way.
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

from tangram.kernels.interface import MOST_BYTES, PrefillRows
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.e4m3 import widen
from tangram.kernels.triton.stored import LayerRows, StoredPool
from tangram.kernels.triton.tiles import absorb_tile, multiply
from tangram.kernels.triton.tiling import Operands, Tile, fit_tile
from tangram.types import Int32, Int64

LEAST_TOKENS = 256  # of a row; entries that are read only a few times are not worth a copy
DTYPES = (torch.float16, torch.bfloat16)  # of queries, and of the copy
TILE = 64  # entries, and queries; segments of the copy begin at multiples of it
_TILE = Tile(TILE, TILE, stages=3)


@dataclass(frozen=True, eq=False)
class Part:
    """Cells (row · H + head) that are computed together: the places `cells` of each layer's order.

    `sources` are the places of those cells whose pasts are copied. `queries` and `keys` are the
    most of a row. `longest` [L] counts the entries of the longest past, `total` [L] those of all
    segments.
    """

    cells: slice
    sources: slice
    queries: int
    keys: int
    longest: Int64
    total: Int64


@dataclass(frozen=True, eq=False)
class GatheredCells:
    """The cells of a `part` in one layer, on the device.

    `order` int32 [cells] and `sources` int32 are the part's, `offsets` int32 [N · H, 2] those of a
    step. `buffers` are two tensors of at least `count_elements` elements, which are overwritten.
    """

    part: Part
    order: Tensor
    offsets: Tensor
    sources: Tensor
    buffers: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class PrefillOrder:
    """The order in which a step's cells are computed, and where their entries are gathered.

    `order` int32 [L, cells]: first the cells of each of the parts `gathered`, then the `paged` ones
    that read pages, last those of rows that another kernel computes. `offsets` int32 [L, N · H, 2]:
    by cell, where its past and its own entries begin in the copy. `sources` int32: cells of the
    last gathered row of each sequence, whose past contains those of its other rows.
    """

    order: Int32
    offsets: Int32
    sources: Int32
    gathered: list[Part]
    paged: slice

    @classmethod
    def of(
        cls, rows: PrefillRows, entry_bytes: int, gathers: bool, apart: Sequence[slice] = ()
    ) -> PrefillOrder:
        """Cells that read most come first.

        A row is gathered or not by its own length alone, and never if it is in `apart`.
        """
        heads, everyone = rows.address.shape[2], np.arange(rows.asking.start, rows.asking.stop)
        others = np.array([row for run in apart for row in range(run.start, run.stop)], np.int64)
        asking = np.setdiff1d(everyone, others)
        wanted = gathers & (_keys(rows)[asking] >= LEAST_TOKENS)
        lots = list(_lots(rows, asking[wanted], MOST_BYTES // entry_bytes))
        offsets = np.zeros((len(rows.address), rows.address.shape[1] * heads, 2), np.int32)
        parts, begin, first = list[Part](), 0, 0
        for lot in lots:
            cells, sources = (
                slice(at, at + len(run) * heads)
                for at, run in ((begin, lot.rows), (first, lot.lasts))
            )
            parts.append(lot.part(rows, offsets, cells, sources))
            begin, first = cells.stop, sources.stop
        runs = [*(lot.rows for lot in lots), asking[~wanted], others]
        order = np.concatenate([_order(rows, run) for run in runs], axis=1).astype(np.int32)
        all_sources = [_cells(lot.lasts, heads) for lot in lots]
        return cls(
            order,
            offsets,
            np.concatenate([np.zeros(0, np.int64), *all_sources]).astype(np.int32),
            parts,
            slice(begin, order.shape[1] - len(others) * heads),
        )


@dataclass(frozen=True, eq=False)
class _Lot:
    """`rows` that are gathered together.

    `lasts` are the last rows of each sequence, `sequence` [rows] points into them.
    """

    rows: Int64
    lasts: Int64
    sequence: Int64

    @classmethod
    def of(cls, rows: PrefillRows, members: Int64) -> _Lot:
        # The offset of the first head's table identifies a sequence.
        _, index, inverse = np.unique(
            rows.address["table"][0, members[::-1], 0], return_index=True, return_inverse=True
        )
        return cls(members, members[::-1][index], inverse[::-1])

    def part(self, rows: PrefillRows, offsets: Int32, cells: slice, sources: slice) -> Part:
        """Lay pasts and own entries end to end and write into `offsets` where they begin."""
        layers, _, heads = rows.address.shape
        pasts, keys = _pasts(rows, self.lasts), _keys(rows)[self.rows]
        new = np.broadcast_to(_tile(keys)[:, None], (layers, len(keys), heads))
        sizes = np.concatenate([_tile(pasts), new], axis=1).reshape(layers, -1)
        ends = np.cumsum(sizes, axis=1)
        begins = (ends - sizes).reshape(layers, -1, heads)
        pasts_begin, own_begin = np.moveaxis(offsets.reshape(layers, -1, heads, 2), -1, 0)
        pasts_begin[:, self.rows] = begins[:, self.sequence]
        own_begin[:, self.rows] = begins[:, len(self.lasts) :]
        queries = rows.queries[self.rows]
        return Part(
            cells, sources, int(queries.max()), int(keys.max()), pasts.max(axis=(1, 2)), ends[:, -1]
        )


def _lots(rows: PrefillRows, members: Int64, most: int) -> Iterator[_Lot]:
    """`members` by sequences in lots of at most `most` entries, or of one sequence."""
    whole, heads = _Lot.of(rows, members), rows.address.shape[2]
    pasts = _tile(_pasts(rows, whole.lasts)).sum(axis=2).max(axis=0)
    new = np.bincount(whole.sequence, _tile(_keys(rows)[members]), minlength=len(pasts)).astype(
        np.int64
    )
    filled, sizes = 0, pasts + heads * new
    lot_of = np.zeros(len(sizes), np.int64)
    for number, size in enumerate(sizes):
        filled += size
        opens = number > 0 and filled > most
        lot_of[number] = lot_of[max(0, number - 1)] + opens
        filled = size if opens else filled
    for lot in range(lot_of.max(initial=-1) + 1):
        yield _Lot.of(rows, members[lot_of[whole.sequence] == lot])


def _order(rows: PrefillRows, members: Int64) -> Int64:
    """[L, cells of `members`]: cells that read most come first."""
    reads = _pasts(rows, members) + _keys(rows)[members, None]
    places = np.argsort(-reads.reshape(len(reads), -1), axis=1, kind="stable")
    return _cells(members, rows.address.shape[2])[places]


def _keys(rows: PrefillRows) -> Int64:
    return rows.keys.astype(np.int64)


def _pasts(rows: PrefillRows, members: Int64) -> Int64:
    """[L, members, H]"""
    return np.asarray(rows.address["length"][:, members], np.int64)


def _cells(members: Int64, heads: int) -> Int64:
    return (members[:, None] * heads + np.arange(heads)).ravel()


def _tile(entries: Int64) -> Int64:
    return -(-entries // TILE) * TILE


def serves(pool: Tensor, card: Card) -> bool:
    """Whether entries of this pool are gathered: the card needs tensor memory access."""
    stored = (*DTYPES, torch.float8_e4m3fn)
    return card.copies_tiles and pool.dtype in stored and pool.shape[-1] in (64, 128)


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["tables", "address", "sources", "offsets"],
)
def gather_pasts(
    pool,
    tables,
    address,
    sources,
    offsets,
    scales,
    gathered_k,
    gathered_v,
    layer,
    H: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copy the past of each source cell to its segment, followed by zeros.

    SCALED: entries are FP8; `scales` as in `decode_tasks`. Grid (tiles of the longest past,
    sources).
    """
    cell = tl.load(sources + tl.program_id(1))
    past = tl.load(address + cell * 3 + 2)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < past:
        d = tl.arange(0, D)
        here = (n < past)[:, None]
        page = tl.load(tables + tl.load(address + cell * 3) + n // P, mask=n < past, other=0).to(
            tl.int64
        )
        column = tl.load(address + cell * 3 + 1)
        place = pool + ((page * HP + column) * (2 * P * D) + (n % P) * D)[:, None] + d[None, :]
        target = (tl.load(offsets + cell * 2) + n).to(tl.int64)[:, None] * D + d[None, :]
        keys = tl.load(place, mask=here, other=0.0)
        values = tl.load(place + P * D, mask=here, other=0.0)
        if SCALED:  # by powers of two: exact
            scale = scales + (layer * H + cell % H) * 2
            keys = widen(keys, tl.float32) * tl.load(scale)
            values = widen(values, tl.float32) * tl.load(scale + 1)
        tl.store(gathered_k + target, keys.to(gathered_k.dtype.element_ty))
        tl.store(gathered_v + target, values.to(gathered_v.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["spans", "order", "offsets"])
def gather_chunks(
    k,
    v,
    spans,
    order,
    offsets,
    gathered_k,
    gathered_v,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the new entries of each cell to their segment, followed by zeros.

    Grid (tiles of the longest row, cells).
    """
    cell = tl.load(order + tl.program_id(1))
    row = cell // H
    head = cell % H
    begin = tl.load(spans + row * 5 + 2)
    count = tl.load(spans + row * 5 + 3) - begin
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < count:
        d = tl.arange(0, D)
        here = (n < count)[:, None]
        source = (begin + n).to(tl.int64)[:, None]
        target = (tl.load(offsets + cell * 2 + 1) + n).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(
            gathered_k + target,
            tl.load(k + source * stride_k + head * stride_k_head + d[None, :], here, other=0.0),
        )
        tl.store(
            gathered_v + target,
            tl.load(v + source * stride_v + head * stride_v_head + d[None, :], here, other=0.0),
        )


@triton.jit
def _absorb(
    softmax, query, keys, values, place, n, last, scaling, MASKED: tl.constexpr, TILE: tl.constexpr
):
    """`absorb_tile` of the entries at `place`."""
    k = keys.load([place, 0])
    scores = multiply(query, tl.trans(k), tl.zeros([query.shape[0], TILE], tl.float32))
    return absorb_tile(softmax, scores, n, last, scaling, values, place, 0, MASKED)


@triton.jit(do_not_specialize_on_alignment=["address", "spans", "order", "offsets"])
def attend_segments(
    q,
    keys,
    values,
    address,
    spans,
    order,
    offsets,
    out,
    scaling,
    stride_q,
    stride_q_head,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of each tile of queries to its past and, causally, to its row.

    Grid (tiles of the longest row, cells · G).
    """
    cell = tl.load(order + tl.program_id(1) // G)
    row = cell // H
    q_begin = tl.load(spans + row * 5)
    queries = tl.load(spans + row * 5 + 1) - q_begin
    # The last tiles see the most entries, so they start first.
    tile = tl.cdiv(queries, TILE) - 1 - tl.program_id(0)
    if tile >= 0:
        query_head = (cell % H) * G + tl.program_id(1) % G
        lead = tl.load(spans + row * 5 + 3) - tl.load(spans + row * 5 + 2) - queries
        past = tl.load(address + cell * 3 + 2)
        past_place = tl.load(offsets + cell * 2)
        own_place = tl.load(offsets + cell * 2 + 1)
        m = tile * TILE + tl.arange(0, TILE)
        n = tl.arange(0, TILE)
        d = tl.arange(0, D)
        token = (q_begin + m).to(tl.int64)[:, None]
        wanted = (m < queries)[:, None]
        query = tl.load(
            q + token * stride_q + query_head * stride_q_head + d[None, :], mask=wanted, other=0.0
        )
        peak = tl.full([TILE], float("-inf"), tl.float32)
        softmax = tl.zeros([TILE, D], tl.float32), peak, tl.zeros([TILE], tl.float32)
        # Whole tiles of both segments in one loop, so that loads run ahead across them.
        past_tiles = past // TILE
        own_tiles = (lead + tile * TILE + 1) // TILE
        for at in range(0, past_tiles + own_tiles):
            place = tl.where(at < past_tiles, past_place, own_place - past_tiles * TILE) + at * TILE
            softmax = _absorb(softmax, query, keys, values, place, n, n, scaling, False, TILE)
        for at in range(past_tiles * TILE, past, TILE):
            last = past - 1 + tl.zeros([TILE], tl.int32)
            softmax = _absorb(
                softmax, query, keys, values, past_place + at, at + n, last, scaling, True, TILE
            )
        for at in range(own_tiles * TILE, lead + tl.minimum(tile * TILE + TILE, queries), TILE):
            softmax = _absorb(
                softmax, query, keys, values, own_place + at, at + n, lead + m, scaling, True, TILE
            )
        acc, _, total = softmax
        place = out + (token * (H * G) + query_head) * D + d[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


def tile_of(dim: int, element_bytes: int, card: Card) -> Tile:
    """The tile of a program on `card`; segments are aligned to its number of entries."""
    return fit_tile(_TILE, Operands(dim, element_bytes, hops=1), card, TILE)


def count_elements(part: Part, layer: int, dim: int) -> int:
    """Elements that the gathered keys, or values, of one layer take."""
    return int(part.total[layer]) * dim


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: StoredPool,
    rows: LayerRows,
    cells: GatheredCells,
    out: Tensor,
    *,
    scaling: float,
) -> None:
    """Attention of the `cells` of a part: q [T, Q, D], k, v [T', H, D] → its rows of out [T, Q, D].

    Otherwise the contract of `prefill.prefill`.
    """
    part, order, layer = cells.part, cells.order, rows.layer
    dim, heads, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    total = int(part.total[layer])
    buffers = [buffer[: total * dim].view(total, dim) for buffer in cells.buffers]
    sizes = {"H": heads, "D": dim, "TILE": TILE}
    if part.longest[layer]:
        gather_pasts[(triton.cdiv(int(part.longest[layer]), TILE), len(cells.sources))](
            *(pool.entries, rows.tables, rows.address, cells.sources, cells.offsets),
            buffers[0] if pool.scales is None else pool.scales,
            *(*buffers, layer),
            **sizes,
            HP=pool.entries.shape[1],
            P=pool.entries.shape[3],
            SCALED=pool.scales is not None,
            num_warps=4,
        )
    gather_chunks[(triton.cdiv(part.keys, TILE), len(order))](
        *(k, v, rows.spans, order, cells.offsets, *buffers, *k.stride()[:2], *v.stride()[:2]),
        **sizes,
        num_warps=4,
    )
    keys, values = (
        TensorDescriptor(buffer, [total, dim], [dim, 1], [TILE, dim]) for buffer in buffers
    )
    tile = tile_of(dim, q.element_size(), pool.card)
    attend_segments[(triton.cdiv(part.queries, TILE), len(order) * group)](
        *(q, keys, values, rows.address, rows.spans, order, cells.offsets),
        *(out, scaling, *q.stride()[:2]),
        **sizes,
        G=group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
