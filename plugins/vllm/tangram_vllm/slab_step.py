"""The attention of one step of vLLM, as addresses for Tangram's kernels.

Steps may cut a sequence anywhere. Its new tokens are *segments*, each within one chunk, which
attend to the sealed chunks before it and to the raw tokens of their own. In each layer first every
chunk that ends is sealed, so that a row may read what another row of its step seals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tangram.compress.scorers import ChunkView
from tangram.kernels import reference
from tangram.kernels.interface import (
    AttentionRule,
    DecodedRows,
    KvPool,
    Launch,
    PassAddresses,
    PoolKernels,
    PrefillRows,
)
from tangram.kernels.transfer import upload
from tangram.model.rotary import Rotary
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.records import ADDRESS, PAST, SPAN, Records
from tangram.plan.schedule import Decoding
from tangram.types import Int32, Int64
from tangram_vllm.flat_tables import FlatTables
from tangram_vllm.keeping import Keeping, NewTokens, NotePlaces, NoteStore
from tangram_vllm.slab import Slab

GROWTH_TOKENS = 128  # assumed growth of a row in the first half of a plan's life


@dataclass(frozen=True)
class Segment:
    """New tokens [begin, end) of a sequence, within one chunk.

    `row` is its row of the step, `first` the place of its first token in the flattened batch.
    """

    row: int
    begin: int
    end: int
    first: int
    chunk_tokens: int

    @property
    def chunk(self) -> int:
        """The chunk of its tokens."""
        return self.begin // self.chunk_tokens

    @property
    def tokens(self) -> int:
        """How many it has."""
        return self.end - self.begin

    @property
    def raw_past(self) -> int:
        """The tokens of its chunk before it."""
        return self.begin % self.chunk_tokens

    @property
    def seals(self) -> bool:
        """Whether it ends its chunk."""
        return self.end % self.chunk_tokens == 0

    @property
    def places(self) -> slice:
        """Its tokens in the flattened batch."""
        return slice(self.first, self.first + self.tokens)


def cut(begin: Sequence[int], end: Sequence[int], chunk_tokens: int) -> list[list[Segment]]:
    """The segments of each row, whose new tokens are [begin, end)."""
    rows, first = [], 0
    for row, (start, stop) in enumerate(zip(begin, end, strict=True)):
        segments = []
        for at in range(start - start % chunk_tokens, stop, chunk_tokens):
            part = max(at, start), min(at + chunk_tokens, stop)
            segments.append(Segment(row, *part, first + part[0] - start, chunk_tokens))
        first += stop - start
        rows.append(segments)
    return rows


class LayerRule(NamedTuple):
    """How a layer attends, and its rotation, where the scorer reads that."""

    attention: AttentionRule
    rotary: Rotary | None = None


class Noting(NamedTuple):
    """The `tokens` of the flattened batch that are noted, and their places."""

    tokens: Tensor
    places: NotePlaces


@dataclass(frozen=True, eq=False)
class ChunkSeal:
    """The seal of the chunk that `segment` ends: prefill row `number` of the launch.

    `past` [L, H] are records of `PAST`, by which the segment's past is read; `noted` are the raw
    tokens of its chunk before it that have notes.
    """

    keeping: Keeping
    segment: Segment
    number: int
    past: Records
    noted: NotePlaces | None

    def run(
        self, step: SlabStep, layer: int, new: NewTokens, notes: Tensor, known: LayerRule
    ) -> None:
        """Keep what the scorer chooses of one layer of the chunk: its raw past and new tokens."""
        segment = self.segment
        queries, keys, values = (x[segment.places].transpose(0, 1) for x in new[:3])
        if segment.raw_past:
            held = [
                step.read(table, column, length - segment.raw_past, length)
                for table, column, length in self.past[layer].tolist()
            ]
            old_keys, old_values = (torch.stack(parts) for parts in zip(*held, strict=True))
            keys = torch.cat([old_keys, keys], dim=1)
            values = torch.cat([old_values, values], dim=1)
        notes = notes[segment.places]
        if self.noted is not None:
            notes = torch.cat([self.noted.read(layer), notes])
        start = segment.chunk * segment.chunk_tokens
        scaling, rotary = known.attention.scaling, known.rotary
        chunk = ChunkView(queries, keys, values, start, layer, scaling, rotary)
        ranking = self.keeping.rank(chunk, notes)
        rows = slice(self.number, self.number + 1)
        step.launch.seal(layer, rows, ranking, keys.transpose(0, 1), values.transpose(0, 1))


@dataclass(frozen=True, eq=False)
class SlabStep:
    """One step on the device; its `launch` runs the attention of each layer.

    `order` says where the launch has the tokens of the flattened batch; None if they lie so.
    """

    pool: KvPool
    tables: Tensor
    launch: Launch
    keeping: Keeping | None
    seals: Sequence[ChunkSeal]
    noting: Noting | None
    order: TokenOrder | None

    def attend(self, layer: int, new: NewTokens, out: Tensor, known: LayerRule) -> None:
        """Seal, note, append and attend: the output [T, Q, D] of `new` tokens → out."""
        rule = known.attention
        if self.keeping is not None and (self.seals or self.noting):
            notes = self.keeping.note(layer, new, rule.scaling)
            for seal in self.seals:
                seal.run(self, layer, new, notes, known)
            if self.noting is not None:
                self.noting.places.write(layer, notes[self.noting.tokens])
        (q, k, v), asked, order = new[:3], out, self.order
        if order is not None:
            q, k, v = q[order.tokens], k[order.tokens], v[order.tokens]
            asked = torch.empty_like(q)
        self.launch.decode(layer, q, k, v, asked, rule)
        answered = self.launch.prefill(layer, q, k, v, asked, rule, None)
        if order is not None:
            torch.index_select(answered, 0, order.places, out=out)
        elif answered is not out:
            out.copy_(answered)

    def read(self, table: int, column: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [end - begin, D] of one head's entries [begin, end)."""
        return reference.gather(self.pool.entries, self.tables, table, column, begin, end)


class TokenOrder(NamedTuple):
    """The tokens of a step in the order of its launch: those of decode rows first, and padded.

    `tokens` are their places in the flattened batch, where padding is the first token, `places` [T]
    those of the flattened batch in the launch.
    """

    tokens: Tensor
    places: Tensor


class KeptPlan(NamedTuple):
    """The plan of decode `rows`, kept while they and their blocks are the same and none is shorter.

    `raw` [R] are tokens of their open chunks.
    """

    rows: object
    raw: Int64
    batch: Decoding
    plan: WorkPlan


class StepBuilder:
    """Makes the steps of one pool. `keeping` says what stays of chunks; None keeps all.

    A row of up to `most_queries` new tokens decodes, unless these lie in two chunks.
    """

    def __init__(
        self,
        slab: Slab,
        pool: KvPool,
        kernels: PoolKernels,
        keeping: Keeping | None,
        *,
        most_rows: int,
        most_queries: int,
    ) -> None:
        self._slab, self._pool, self._kernels = slab, pool, kernels
        self._keeping = None if slab.layout.keeps_everything else keeping
        self._store = None if slab.notes is None else NoteStore(slab, slab.notes, pool.entries)
        self._most_rows, self._most_queries = most_rows, most_queries
        # A row has one table for the chunk that it ends in, and one for a chunk that it ends.
        self._tables = FlatTables(slab, 2 * most_rows, pool.entries.device)
        self._lengths = np.zeros((2 * most_rows, len(slab.layout.groups)), np.int32)
        self._planned: KeptPlan | None = None

    def build(self, cells: Int32, begin: Sequence[int], end: Sequence[int]) -> SlabStep:
        """The step of rows with new tokens [begin, end), one at least in each.

        `cells` [R, n] are rows of vLLM's block table.
        """
        rows = cut(begin, end, self._chunk_tokens)
        self._tables.write(np.arange(len(rows)), cells, np.asarray(end) // self._chunk_tokens)
        decodes = [len(row) == 1 and row[0].tokens <= self._most_queries for row in rows]
        decode = [row[0] for row, alone in zip(rows, decodes, strict=True) if alone]
        rest = [
            segment
            for row, alone in zip(rows, decodes, strict=True)
            if not alone
            for segment in row
        ]
        tables = {segment: self._find_table(segment, cells, end) for segment in (*decode, *rest)}
        ending = [segment for segment in tables if segment.seals and self._keeping is not None]
        decoded = self._decode(decode, tables, cells) if decode else None
        width = 0 if decoded is None else decoded.width
        prefill = self._prefill(rest, ending, tables, width)
        flat = self._tables.flat()
        launch = self._kernels.launch(PassAddresses(self._lengths.copy(), decoded, prefill), flat)
        seals = self._seals(ending, tables, cells, len(rest))
        noting, order = self._note(tables, cells), self._order(decode, rest, width)
        return SlabStep(self._pool, flat, launch, self._keeping, seals, noting, order)

    def _seals(
        self, ending: Sequence[Segment], tables: Mapping[Segment, int], cells: Int32, first: int
    ) -> list[ChunkSeal]:
        """The seals of chunks that end, which are prefill rows from number `first` on."""
        if self._keeping is None:
            return []
        pasts = self._pasts(ending, [tables[segment] for segment in ending])
        store = self._store
        return [
            ChunkSeal(
                self._keeping,
                segment,
                first + at,
                pasts[:, at],
                None
                if store is None
                else store.find(self._raw_blocks(segment, cells), 0, segment.raw_past),
            )
            for at, segment in enumerate(ending)
        ]

    def _note(self, segments: Iterable[Segment], cells: Int32) -> Noting | None:
        """What is noted of new tokens: nothing of a chunk that the step has as a whole."""
        store = self._store
        if store is None:
            return None
        noted = [segment for segment in segments if segment.raw_past or not segment.seals]
        if not noted:
            return None
        found = [
            store.find(self._raw_blocks(each, cells), each.raw_past, each.raw_past + each.tokens)
            for each in noted
        ]
        tokens = [
            torch.arange(each.places.stop - places.shape[1], each.places.stop)
            for each, (_, places) in zip(noted, found, strict=True)
        ]
        places = torch.cat([places for _, places in found], dim=1)
        return Noting(torch.cat(tokens).to(places.device), found[0]._replace(places=places))

    def _raw_blocks(self, segment: Segment, cells: Int32) -> Int64:
        first = segment.chunk * self._slab.columns
        return cells[segment.row, first : first + self._slab.raw_blocks].astype(np.int64)

    @property
    def _chunk_tokens(self) -> int:
        return self._slab.layout.chunk_tokens

    def _find_table(self, segment: Segment, cells: Int32, end: Sequence[int]) -> int:
        """The table that `segment` reads: its row's, or one for a chunk that it ends."""
        if not segment.raw_past or segment.chunk == end[segment.row] // self._chunk_tokens:
            return segment.row
        table = self._most_rows + segment.row
        row = slice(segment.row, segment.row + 1)
        self._tables.write(np.array([table]), cells[row], np.array([segment.chunk]))
        return table

    def _order(
        self, decode: Sequence[Segment], rest: Sequence[Segment], width: int
    ) -> TokenOrder | None:
        """The tokens of `decode`, padded to `width`, and those of `rest`."""
        places = [np.arange(each.first, each.first + each.tokens) for each in (*decode, *rest)]
        tokens = np.concatenate(places)
        padding = width - sum(segment.tokens for segment in decode)
        if not padding and (np.diff(tokens) == 1).all():
            return None
        begin = width - padding
        back = np.empty_like(tokens)
        back[tokens] = np.arange(len(tokens)) + padding * (np.arange(len(tokens)) >= begin)
        tokens = np.insert(tokens, begin, np.zeros(padding, np.int64))
        device = self._pool.entries.device
        return TokenOrder(upload(tokens, device), upload(back, device))

    def _decode(
        self, segments: Sequence[Segment], tables: Mapping[Segment, int], cells: Int32
    ) -> DecodedRows:
        """The rows that decode, under their plan."""
        layout = self._slab.layout
        counts = np.array([segment.tokens for segment in segments], np.int32)
        read = np.array([tables[segment] for segment in segments])
        chunks, raw = np.divmod([segment.end - 1 for segment in segments], self._chunk_tokens)
        self._lengths[read] = layout.lengths(chunks, raw + 1)
        queries = int(counts.max())
        blocks = cells[[segment.row for segment in segments]]
        known = queries, read.tobytes(), chunks.tobytes(), blocks.tobytes()
        planned = self._planned
        if planned is None or planned.rows != known or (raw < planned.raw).any():
            batch = self._batch(read, chunks, raw, queries)
            planned = KeptPlan(known, raw, batch, self._kernels.plan(batch)[0])
            self._planned = planned
        width = self._kernels.width(int(counts.sum()), queries)
        return DecodedRows.of(planned.batch, planned.plan, counts, width)

    def _batch(self, tables: Int64, chunks: Int64, raw: Int64, queries: int) -> Decoding:
        layout, geometry = self._slab.layout, self._slab.layout.geometry
        first = layout.head_address.view(ADDRESS)[..., 0]
        address = np.empty((geometry.layers, len(tables), geometry.kv_heads), ADDRESS)
        address["table"] = first["table"][:, None] + (tables * self._tables.host.shape[1])[:, None]
        address["column"] = first["column"][:, None]
        address["length_index"] = (
            first["length_index"][:, None] + (tables * self._lengths.shape[1])[:, None]
        )
        grown = layout.lengths(chunks, np.minimum(raw + GROWTH_TOKENS, self._chunk_tokens))
        budget = grown[:, layout.head_group]
        decode = DecodeRows(address, budget, geometry.windows, layout.page_tokens)
        kept = np.broadcast_to(layout.head_kept_tokens, decode.shape)
        prefixes = partial(self._prefixes, decode.table[:, 0, 0], chunks)
        lengths, group = self._lengths.flatten(), geometry.group_size
        return Decoding(decode, lengths, group, kept, prefixes, queries)

    def _prefixes(self, table: Int32, chunks: Int64) -> Forest:
        """The prefix forest: which rows share which sealed chunks, by the pages of one head."""
        layout, nothing = self._slab.layout, np.zeros_like(chunks)
        pages = np.full(len(chunks), layout.sealed_pages[layout.head_group[0, 0]], np.int64)
        units = units_of(self._tables.host.ravel(), table, pages, chunks, nothing)
        return build_forest(*units, chunks)

    def _prefill(
        self,
        segments: Sequence[Segment],
        ending: Sequence[Segment],
        tables: Mapping[Segment, int],
        first: int,
    ) -> PrefillRows:
        """Rows that attend, from token `first` of the launch on, and rows of chunks that end."""
        layout = self._slab.layout
        spans = np.zeros(len(segments) + len(ending), SPAN)
        address = np.concatenate(
            [
                self._pasts(segments, [tables[segment] for segment in segments]),
                self._pasts(ending, [segment.row for segment in ending], raw=False),
            ],
            axis=1,
        )
        kept = np.empty(address.shape, np.int32)
        for number, segment in enumerate(segments):
            end = first + segment.tokens
            spans[number] = first, end, first, end, segment.begin
            whole = segment.seals and not segment.raw_past
            kept[:, number] = layout.head_kept_tokens if whole else segment.tokens
            first = end
        for number, segment in enumerate(ending, len(segments)):
            spans[number] = 0, 0, 0, segment.chunk_tokens, segment.chunk * segment.chunk_tokens
            kept[:, number] = layout.head_kept_tokens
        return PrefillRows(address, spans, kept, kept, slice(0, len(segments)))

    def _pasts(
        self, segments: Sequence[Segment], tables: Sequence[int], *, raw: bool = True
    ) -> Records:
        """`PAST` [L, N, H]: the sealed chunks before each of N segments, and its raw past."""
        layout, geometry = self._slab.layout, self._slab.layout.geometry
        heads = layout.head_address.view(ADDRESS)[..., 0]
        pasts = np.empty((geometry.layers, len(segments), geometry.kv_heads), PAST)
        for number, (segment, table) in enumerate(zip(segments, tables, strict=True)):
            addressed = pasts[:, number]
            addressed["table"] = heads["table"] + table * self._tables.host.shape[1]
            addressed["column"] = heads["column"]
            past = layout.lengths(segment.chunk, segment.raw_past if raw else 0)
            addressed["length"] = past[layout.head_group]
        return pasts
