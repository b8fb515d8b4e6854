"""Prefill attention over latents that one product expands (Triton).

The pasts of a pass and its new latents lie end to end in one matrix. Products with the map of all
heads make keys and values of them, which the kernel loads by tensor memory access from where the
products left them. Rotary keys are read from the latents: they are those of all heads. Rows of one
sequence read one copy of its past, each up to its own length.

What a row gets depends on its own tokens and past alone. All products have one shape, since a
library may sum in another order for another number of rows. A past is cut by its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tangram.kernels.interface import MOST_BYTES, Expansion
from tangram.kernels.reference import gather, merge_parts
from tangram.kernels.transfer import upload
from tangram.kernels.triton.card import HOPPER, Card
from tangram.kernels.triton.stored import StoredPool
from tangram.kernels.triton.tiles import LOG2E, absorb_tile, multiply
from tangram.kernels.triton.tiling import (
    LEAST_ENTRIES,
    Operands,
    Tile,
    count_shared_bytes,
    fit_tile,
)
from tangram.plan.records import Records
from tangram.types import Int32, Int64

DTYPES = (torch.float16, torch.bfloat16)
TILE = 64  # entries, and queries; segments begin at multiples of it
_AT_A_TIME = 1024  # entries of a product
_TILE, _WIDE_TILE = Tile(TILE, TILE, stages=2), Tile(2 * TILE, TILE, warps=8, stages=3)


@dataclass(frozen=True, eq=False)
class LatentRows:
    """N ≥ 1 prefill rows, whose pages the flat block `tables` list.

    `spans` [N] have a `SPAN` of each, whose keys are new latents, and `address` [N] a `PAST`.
    Neighbours with one table are of one sequence, whose past grows from row to row.
    """

    spans: Records
    address: Records
    tables: Tensor

    @property
    def sequences(self) -> Iterator[slice]:
        """Runs of rows that read one past."""
        table, length = self.address["table"], self.address["length"]
        apart = np.flatnonzero((np.diff(table) != 0) | (np.diff(length) < 0)) + 1
        for begin, end in pairwise([0, *apart.tolist(), len(table)]):
            yield slice(begin, end)


@triton.jit
def _take(
    softmax,
    queries,
    keys,
    values,
    rotary,
    place,
    column,
    n,
    last,
    scaling,
    RANK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """`absorb_tile` of the entries at `place`, for one head, whose keys begin at `column`.

    `queries` are without rotary elements, and these.
    """
    query, turned = queries
    scores = tl.zeros([query.shape[0], TILE], tl.float32)
    scores = multiply(query, tl.trans(keys.load([place, column])), scores)
    scores = multiply(turned, tl.trans(rotary.load([place, RANK])), scores)
    return absorb_tile(softmax, scores, n, last, scaling, values, place, column + PLAIN, MASKED)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["rows"])
def attend_expanded(
    q,
    keys,
    values,
    rotary,
    rows,
    out,
    lse,
    tiles,
    scaling,
    stride_q,
    stride_q_head,
    Q: tl.constexpr,
    RANK: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Attention of each tile of queries to its past and, causally, to its row.

    `rows` [N, 6]: first query, queries, past entries, their place, place of the row's own entries,
    their number, 0 to leave them out. A key may be loaded with some of its value: queries are 0
    there. PARTIAL: `lse` [T, Q] is written, too. The grid has
    N · Q times `tiles` programs, those of the longest row.
    """
    cell = tl.program_id(0) // tiles
    row = rows + cell // Q * 6
    head = cell % Q
    begin = tl.load(row)
    queries = tl.load(row + 1)
    # The last tiles see the most entries, so they start first.
    tile = tl.cdiv(queries, BLOCK_M) - 1 - tl.program_id(0) % tiles
    if tile >= 0:
        past = tl.load(row + 2)
        past_place = tl.load(row + 3)
        own_place = tl.load(row + 4)
        count = tl.load(row + 5)
        lead = count - queries
        column = head * (PLAIN + VALUE)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.arange(0, TILE)
        d = tl.arange(0, BLOCK_D)
        r = tl.arange(0, BLOCK_R)
        v = tl.arange(0, BLOCK_V)
        token = (begin + m).to(tl.int64)[:, None]
        wanted = (m < queries)[:, None]
        source = q + token * stride_q + head.to(tl.int64) * stride_q_head
        query = tl.load(source + d[None, :], mask=wanted & (d < PLAIN)[None, :], other=0.0)
        turned = tl.load(
            source + PLAIN + r[None, :], mask=wanted & (r < ROTARY)[None, :], other=0.0
        )
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        softmax = tl.zeros([BLOCK_M, BLOCK_V], tl.float32), peak, tl.zeros([BLOCK_M], tl.float32)
        # Whole tiles of both segments in one loop, so that loads run ahead across them.
        past_tiles = past // TILE
        own_tiles = tl.where(count > 0, (lead + tile * BLOCK_M + 1) // TILE, 0)
        for at in range(0, past_tiles + own_tiles):
            place = tl.where(at < past_tiles, past_place, own_place - past_tiles * TILE) + at * TILE
            softmax = _take(
                *(softmax, (query, turned), keys, values, rotary, place, column, n, m, scaling),
                *(RANK, PLAIN, False, TILE),
            )
        for at in range(past_tiles * TILE, past, TILE):
            last = past - 1 + tl.zeros([BLOCK_M], tl.int32)
            softmax = _take(
                *(softmax, (query, turned), keys, values, rotary, past_place + at, column),
                *(at + n, last, scaling, RANK, PLAIN, True, TILE),
            )
        end = tl.where(count > 0, lead + tl.minimum(tile * BLOCK_M + BLOCK_M, queries), 0)
        for at in range(own_tiles * TILE, end, TILE):
            softmax = _take(
                *(softmax, (query, turned), keys, values, rotary, own_place + at, column),
                *(at + n, lead + m, scaling, RANK, PLAIN, True, TILE),
            )
        acc, peak, total = softmax
        seen = tl.where(total > 0, total, 1.0)
        target = out + (token * Q + head) * VALUE + v[None, :]
        result = (acc / seen[:, None]).to(out.dtype.element_ty)
        tl.store(target, result, mask=wanted & (v < VALUE)[None, :])
        if PARTIAL:
            logarithm = tl.where(total > 0, (peak + tl.log2(seen)) / LOG2E, float("-inf"))
            tl.store(lse + (begin + m).to(tl.int64) * Q + head, logarithm, mask=m < queries)


def serves(pool: StoredPool, dtype: torch.dtype, expansion: Expansion) -> bool:
    """Whether latents of this pool are attended so.

    The card needs tensor memory access, and shared memory for a tile.
    """
    width, card = pool.entries.shape[-1], pool.card
    aligned = width % 8 == 0 == expansion.up[:, :, 0].numel() % 8
    if not card.copies_tiles or dtype not in DTYPES or not aligned:
        return False
    operands = _operands(_blocks(expansion, width), dtype.itemsize)
    return count_shared_bytes(_TILE, operands, card) <= card.shared_bytes


def attend(
    q: Tensor,
    latents: Tensor,
    pool: StoredPool,
    rows: LatentRows,
    expansion: Expansion,
    out: Tensor,
    *,
    scaling: float,
    most_bytes: int = MOST_BYTES,
    tile: Tile | None = None,
) -> None:
    """Attention of all `rows`: q [T, Q, D'] and new latents [M, D] → their tokens of out [T, Q, V].

    Keys and values of at most `most_bytes`, beside those of new latents, are expanded at a time.
    """
    entry_bytes = expansion.up[:, :, 0].numel() * q.element_size()
    most = max(TILE, most_bytes // entry_bytes // TILE * TILE)
    how = expansion, scaling, pool.card, tile
    for lot in _lots(rows, most):
        spans, address = rows.spans[lot].copy(), rows.address[lot]
        last = int(_last_cut(address["length"], most).max())
        begin, end = 0, len(q)
        if last:
            begin, end = int(spans["query_begin"].min()), int(spans["query_end"].max())
        for column in ("query_begin", "query_end"):
            spans[column] -= begin
        moved, asking = replace(rows, spans=spans, address=address), q[begin:end]
        entries = latents, pool.entries
        final = _Part.of(moved, last, last + most, *entries, causal=True)
        if not last:
            final.attend(asking, *how, out)
            continue
        merged = final.attend(asking, *how)
        for first in range(0, last, most):
            part = _Part.of(moved, first, first + most, *entries)
            merged = merge_parts([merged, part.attend(asking, *how)])
        out[begin:end] = merged[0].to(q.dtype)


def _lots(rows: LatentRows, most: int) -> Iterator[slice]:
    """Sequences whose pasts have at most `most` entries together; rows of one longer past that are
    cut alike.
    """
    begin, filled = 0, 0
    for run in rows.sequences:
        lengths = rows.address["length"][run]
        past = _tile(int(lengths.max()))
        if run.start > begin and filled + past > most:
            yield slice(begin, run.start)
            begin, filled = run.start, 0
        for cut in np.flatnonzero(np.diff(_last_cut(lengths, most))).tolist():
            yield slice(begin, run.start + cut + 1)
            begin = run.start + cut + 1
        filled += past
    yield slice(begin, len(rows.spans))


def _last_cut(lengths: Int32, most: int) -> Int32:
    """Where the last part of pasts of `lengths` [N] begins."""
    return np.maximum(lengths - 1, 0) // most * most


@dataclass(frozen=True, eq=False)
class _Part:
    """What one launch attends: `entries` [n, D] that are gathered, and `table` of `rows` in them.

    See `attend_expanded`.
    """

    entries: Tensor
    table: Int32

    @classmethod
    def of(
        cls,
        rows: LatentRows,
        begin: int,
        end: int,
        latents: Tensor,
        pool: Tensor,
        *,
        causal: bool = False,
    ) -> _Part:
        """Entries [begin, end) of all pasts, and with `causal` the rows' own."""
        spans = rows.spans
        starts, counts = (
            spans["key_begin"].astype(np.int64),
            spans["key_end"] - spans["key_begin"],
        )
        seen = np.clip(rows.address["length"], begin, end) - begin
        sequences = list(rows.sequences)
        sizes = [_tile(int(seen[run].max())) for run in sequences]
        own_sizes = [_tile(count) * causal for count in counts.tolist()]
        places = np.cumsum([0, *sizes, *own_sizes])
        count = -(-int(places[-1]) // _AT_A_TIME) * _AT_A_TIME
        entries = latents.new_zeros((count, latents.shape[1]))
        past_place = np.zeros(len(seen), np.int64)
        for run, place in zip(sequences, places.tolist(), strict=False):
            past_place[run] = place
            table, column, _ = rows.address[run.start].tolist()
            count = int(seen[run].max())
            held, _ = gather(pool, rows.tables, table, column, begin, begin + count)
            entries[place : place + count] = held.to(latents.dtype)
        own_place = places[len(sizes) : -1]
        if causal:
            _copy(latents, entries, starts, counts, own_place)
        columns = [
            spans["query_begin"],
            spans["query_end"] - spans["query_begin"],
            seen,
            past_place,
            own_place,
            counts if causal else 0 * counts,
        ]
        return cls(entries, np.stack(columns, 1).astype(np.int32))

    def attend(
        self,
        q: Tensor,
        expansion: Expansion,
        scaling: float,
        card: Card,
        tile: Tile | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output in `out`, or as a part in float32 with its log-sum-exp [T, Q]."""
        heads, _, rank = expansion.up.shape
        sizes = _sizes(expansion, self.entries.shape[1])
        up = expansion.up.reshape(-1, rank).t()
        expanded = self.entries.new_empty((len(self.entries), up.shape[1]))
        for begin in range(0, len(self.entries), _AT_A_TIME):
            some = slice(begin, begin + _AT_A_TIME)
            torch.mm(self.entries[some, :rank], up, out=expanded[some])
        blocks = _blocks(expansion, self.entries.shape[1])
        keys, values, turned = (
            TensorDescriptor(x, list(x.shape), list(x.stride()), [TILE, block])
            for x, block in zip((expanded, expanded, self.entries), blocks, strict=True)
        )
        partial = out is None
        if out is None:
            out = q.new_empty((*q.shape[:2], sizes[1]), dtype=torch.float32)
        lse = torch.empty(q.shape[:2] if partial else (1, 1), dtype=torch.float32, device=q.device)
        tile = tile or tile_of(blocks, q.element_size(), card)
        tiles = triton.cdiv(int(self.table[:, 1].max()), tile.queries)
        attend_expanded[(tiles * len(self.table) * heads,)](
            *(q, keys, values, turned, upload(self.table, q.device), out, lse, tiles, scaling),
            *q.stride()[:2],
            **{"Q": heads, "RANK": rank, "PLAIN": sizes[0], "VALUE": sizes[1], "ROTARY": sizes[2]},
            **{"BLOCK_D": blocks[0], "BLOCK_V": blocks[1], "BLOCK_R": blocks[2]},
            BLOCK_M=tile.queries,
            TILE=TILE,
            PARTIAL=partial,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out, lse


def tile_of(blocks: Sequence[int], element_bytes: int, card: Card) -> Tile:
    """The tile of a program on `card`, for entries of these `_blocks`.

    On an H200 the wide one was the fastest measured (`bench.kernels.latents`).
    """
    operands = _operands(blocks, element_bytes)
    wide = count_shared_bytes(_WIDE_TILE, operands, card) <= card.shared_bytes
    if card.capability == HOPPER and wide:
        return _WIDE_TILE
    return fit_tile(_TILE, operands, card, TILE)


def _sizes(expansion: Expansion, width: int) -> tuple[int, int, int]:
    """Elements of a key without rotary ones, of a value, and rotary ones; a latent has `width`."""
    _, both, rank = expansion.up.shape
    return both - expansion.value_dim, expansion.value_dim, width - rank


def _blocks(expansion: Expansion, width: int) -> list[int]:
    """`_sizes` as they are loaded."""
    sizes = _sizes(expansion, width)
    return [max(LEAST_ENTRIES, triton.next_power_of_2(size)) for size in sizes]


def _operands(blocks: Sequence[int], element_bytes: int) -> Operands:
    return Operands(sum(blocks), element_bytes, hops=1, vectors=1)


def _copy(source: Tensor, target: Tensor, starts: Int64, counts: Int32, places: Int64) -> None:
    """Copy `counts` rows of `source` from `starts` to `places` of `target`, end to end if so."""
    together = (np.diff(starts) == counts[:-1]).all() and (np.diff(places) == counts[:-1]).all()
    if together:
        starts, counts, places = starts[:1], counts.sum(keepdims=True), places[:1]
    for start, count, place in zip(starts, counts, places, strict=True):
        target[place : place + count] = source[start : start + count]


def _tile(entries: int) -> int:
    return -(-entries // TILE) * TILE
