"""The attention of one step of vLLM, as addresses for Tangram's kernels.

Steps may cut a sequence anywhere. Its new tokens are *segments*, each within one chunk, which
attend to the sealed chunks before it and to the raw tokens of their own. In each layer first every
chunk that ends is sealed, so that a row may read what another row of its step seals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tangram.compress.scorers import ChunkView
from tangram.errors import IntegrityError
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
from tangram.model.sealing import GroupScores, find_group_scores
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
class WholeChunks:
    """Chunks that a step has from their first token on: prefill `rows` of the launch, N of them.

    `starts` [N] are the positions of their first tokens. Their `tokens` [N · C] lie end to end: the
    places of the flattened batch, or a slice of these.
    """

    rows: slice
    starts: Sequence[int]
    tokens: Tensor | slice

    def seal(
        self, step: SlabStep, layer: int, new: NewTokens, notes: Tensor, known: LayerRule
    ) -> None:
        """Keep what the scorer chooses of one layer of each chunk."""
        queries, keys, values = (x[self.tokens].transpose(0, 1) for x in new[:3])
        chunks = ChunkView(queries, keys, values, 0, layer, known.attention.scaling, known.rotary)
        scores = step.require_sealing().score(chunks, self.starts, notes[self.tokens])
        step.seal(layer, self.rows, scores, keys, values)


@dataclass(frozen=True, eq=False)
class OpenChunk:
    """A chunk of which earlier steps had the first tokens: prefill row `number` of the launch.

    `segment` ends it. `held` are its tokens before that, and `noted` those of them that have notes.
    """

    number: int
    segment: Segment
    held: HeldTokens
    noted: NotePlaces | None

    def seal(
        self, step: SlabStep, layer: int, new: NewTokens, notes: Tensor, known: LayerRule
    ) -> None:
        """Keep what the scorer chooses of one layer of the chunk: its raw past and new tokens."""
        segment = self.segment
        queries, keys, values = (x[segment.places].transpose(0, 1) for x in new[:3])
        old_keys, old_values = self.held.read(step.pool.entries, step.tables, layer)
        keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        notes = notes[segment.places]
        if self.noted is not None:
            notes = torch.cat([self.noted.read(layer), notes])
        start = segment.chunk * segment.chunk_tokens
        chunk = ChunkView(
            queries, keys, values, start, layer, known.attention.scaling, known.rotary
        )
        scores = step.require_sealing().score(chunk, [start], notes)
        step.seal(layer, slice(self.number, self.number + 1), scores, keys, values)


class HeldTokens(NamedTuple):
    """Raw tokens in pages: of each head the pages' places in the flat tables [L, H, n], and its
    `column` [L, H, 1] there; `inside` [n] are the tokens' places in their pages.
    """

    pages: Tensor
    column: Tensor
    inside: Tensor

    def read(self, entries: Tensor, tables: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, n, D] of one layer."""
        pages = tables[self.pages[layer]].long()
        found = entries[pages, self.column[layer], :, self.inside]
        return found[:, :, 0], found[:, :, 1]


@dataclass(frozen=True, eq=False)
class DecodedChunks:
    """N chunks that decode has filled: `held` are all of their tokens. `starts` are as above.

    They are the prefill rows of the pass at `addresses`. Their scorer reads entries alone.
    """

    addresses: PassAddresses
    held: HeldTokens
    starts: Sequence[int]

    def seal(
        self, sealing: ChunkSealing, pool: KvPool, kernels: PoolKernels, tables: Tensor
    ) -> None:
        """Keep what the scorer chooses, before anything is written to their pages."""
        launch = kernels.launch(self.addresses, tables)
        for layer in range(pool.layers):
            keys, values = self.held.read(pool.entries, tables, layer)
            # Nobody reads queries, or their scale.
            chunks = ChunkView(keys, keys, values, 0, layer, scaling=1.0)
            ranking = sealing.keeping.rank(sealing.score(chunks, self.starts))
            rows = slice(0, len(self.starts))
            launch.seal(layer, rows, ranking, keys.transpose(0, 1), values.transpose(0, 1))


class ChunkSealing(NamedTuple):
    """What stays of chunks, and what scores several together, if something does."""

    keeping: Keeping
    together: GroupScores | None

    def score(
        self, chunks: ChunkView, starts: Sequence[int], notes: Tensor | None = None
    ) -> Tensor:
        """[N, H, C]: the scores of N chunks that begin at `starts`, as if they were one.

        `notes` are those of the last tokens of one chunk, or of all tokens of all.
        """
        count = len(starts)
        if self.together is not None:
            return self.together(chunks, count)
        parts = [
            torch.unflatten(x, 1, (count, -1)).unbind(1)
            for x in (chunks.queries, chunks.keys, chunks.values)
        ]
        noted = [None] * count if notes is None else torch.unflatten(notes, 0, (count, -1))
        scores = [
            self.keeping.score(replace(chunks, start=start, queries=q, keys=k, values=v), known)
            for start, known, q, k, v in zip(starts, noted, *parts, strict=True)
        ]
        return torch.stack(scores)


@dataclass(frozen=True, eq=False)
class SlabStep:
    """One step on the device; its `launch` runs the attention of each layer.

    `sealing` None keeps everything. `width` tokens of the flattened batch are
    those of the launch, which may be more than the step has, where they are only padding. `order`
    says where the launch has the tokens of the flattened batch; None if they lie so.
    """

    pool: KvPool
    tables: Tensor
    launch: Launch
    sealing: ChunkSealing | None
    seals: Sequence[WholeChunks | OpenChunk]
    noting: Noting | None
    tokens: int
    width: int
    order: TokenOrder | None

    def require_sealing(self) -> ChunkSealing:
        """What stays of chunks. Raises `IntegrityError` where all of each does."""
        if self.sealing is None:
            raise IntegrityError("a chunk is sealed of which everything stays")
        return self.sealing

    def attend(self, layer: int, new: NewTokens, out: Tensor, known: LayerRule) -> None:
        """Seal, note, append and attend: the output [T, Q, D] of `new` tokens → out.

        Both may have more tokens than the step, as padding.
        """
        rule = known.attention
        if self.sealing is not None and (self.seals or self.noting):
            notes = self.sealing.keeping.note(layer, new, rule.scaling)
            for seal in self.seals:
                seal.seal(self, layer, new, notes, known)
            if self.noting is not None:
                self.noting.places.write(layer, notes[self.noting.tokens])
        order = self.order
        if order is None or (order.pads and len(new.q) >= self.width):
            q, k, v, asked = (x[: self.width] for x in (*new[:3], out))
            order = None
        else:
            q, k, v = (x[order.tokens] for x in new[:3])
            asked = torch.empty_like(q)
        self.launch.decode(layer, q, k, v, asked, rule)
        answered = self.launch.prefill(layer, q, k, v, asked, rule, None)
        if order is not None:
            torch.index_select(answered, 0, order.places, out=out[: self.tokens])
        elif answered is not asked:
            asked.copy_(answered)

    def seal(self, layer: int, rows: slice, scores: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store what stays of N chunks: `scores` [N, H, C], keys and values [H, N · C, D]."""
        ranking = self.require_sealing().keeping.rank(scores)
        self.launch.seal(layer, rows, ranking, keys.transpose(0, 1), values.transpose(0, 1))


class TokenOrder(NamedTuple):
    """The tokens of a step in the order of its launch: those of decode rows first, and padded.

    `tokens` are their places in the flattened batch, where padding is the first token, `places` [T]
    those of the flattened batch in the launch. If it only `pads`, all tokens lie in this order.
    """

    tokens: Tensor
    places: Tensor
    pads: bool


class KeptPlan(NamedTuple):
    """The plan of decode `rows`, kept while they are the same and none is shorter.

    `raw` [R] are tokens of their open chunks.
    """

    rows: object
    raw: Int64
    batch: Decoding
    plan: WorkPlan


class StepBuilder:
    """Makes the steps of one pool. `keeping` says what stays of chunks; None keeps all.

    A row of up to `most_queries` new tokens decodes, unless these lie in two chunks. If it
    `shares`, chunks that rows have in common are read once, for which it waits for the device.
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
        shares: bool,
    ) -> None:
        self._slab, self._pool, self._kernels = slab, pool, kernels
        self._sealing = None
        if keeping is not None and not slab.layout.keeps_everything:
            scorer = keeping.scorer
            together = None if scorer.by_token else find_group_scores(scorer, kernels)
            self._sealing = ChunkSealing(keeping, together)
        self._store = None if slab.notes is None else NoteStore(slab, slab.notes, pool.entries)
        self._most_rows, self._most_queries, self._shares = most_rows, most_queries, shares
        # A row has one table for the chunk that it ends in, and one for a chunk that it ends.
        self._tables = FlatTables(slab, 2 * most_rows, pool.entries.device)
        self._lengths = np.zeros((2 * most_rows, len(slab.layout.groups)), np.int32)
        self._planned: KeptPlan | None = None
        self._reserved = set[int]()
        self._due: DecodedChunks | None = None

    @property
    def _defers(self) -> bool:
        """Whether chunks that decode fills are sealed before the next step, instead of within."""
        return self._sealing is None or self._sealing.keeping.reads_entries

    def build(
        self,
        cells: Tensor,
        begin: Sequence[int],
        end: Sequence[int],
        *,
        padded: int = 0,
        reserves: bool = False,
    ) -> SlabStep:
        """The step of rows with new tokens [begin, end), one at least in each.

        `cells` int32 [R, n], on the device, are rows of vLLM's block table. Chunks that decode has
        filled before are sealed. If it `reserves`, and all rows decode a token, a graph that is
        captured over this step replays all later ones with as many `padded` rows.
        """
        if self._due is not None and self._sealing is not None:
            self._due.seal(self._sealing, self._pool, self._kernels, self._tables.flat)
        self._due = None
        rows = cut(begin, end, self._chunk_tokens)
        decodes = [len(row) == 1 and row[0].tokens <= self._most_queries for row in rows]
        decode = [row[0] for row, alone in zip(rows, decodes, strict=True) if alone]
        rest = [
            segment
            for row, alone in zip(rows, decodes, strict=True)
            if not alone
            for segment in row
        ]
        tables = self._write_tables([*decode, *rest], cells, end)
        ending = [segment for segment in tables if segment.seals and self._sealing is not None]
        filled = [segment for segment in ending if self._defers and segment in decode]
        ending = [segment for segment in ending if segment not in filled]
        # Whole chunks are sealed together.
        ending.sort(key=lambda segment: segment.raw_past > 0)
        alike = not rest and all(segment.tokens == 1 for segment in decode)
        if not alike or not (reserves or padded in self._reserved):
            padded = 0
        decoded = self._decode(decode, tables, cells, padded) if decode else None
        if decoded is not None and padded and padded not in self._reserved:
            self._kernels.reserve(decoded)
            self._reserved.add(padded)
        width = 0 if decoded is None else decoded.width
        prefill = self._prefill(rest, ending, tables, width)
        flat, last = self._tables.flat, rows[-1][-1]
        launch = self._kernels.launch(PassAddresses(self._lengths.copy(), decoded, prefill), flat)
        seals = list(self._seals(ending, tables, cells, len(rest)))
        noting, order = self._note(tables, cells), self._order(decode, rest, width)
        if filled:
            self._due = self._defer(filled, tables)
        tokens = last.places.stop
        known = self._pool, flat, launch, self._sealing, seals, noting
        return SlabStep(*known, tokens, tokens if order is None else len(order.tokens), order)

    def _write_tables(
        self, segments: Sequence[Segment], cells: Tensor, end: Sequence[int]
    ) -> dict[Segment, int]:
        """The table that each segment reads: its row's, or one for a chunk that it ends."""
        chunks = np.asarray(end) // self._chunk_tokens
        found = {
            segment: segment.row
            + self._most_rows * bool(segment.raw_past and segment.chunk != chunks[segment.row])
            for segment in segments
        }
        apart = [segment for segment, table in found.items() if table >= self._most_rows]
        rows = [*range(len(chunks)), *(segment.row for segment in apart)]
        tables = np.array([*range(len(chunks)), *(found[segment] for segment in apart)])
        own = np.array([*chunks, *(segment.chunk for segment in apart)])
        self._tables.write(tables, cells[rows] if apart else cells, own)
        return found

    def _seals(
        self, ending: Sequence[Segment], tables: Mapping[Segment, int], cells: Tensor, first: int
    ) -> Iterator[WholeChunks | OpenChunk]:
        """The seals of chunks that end, which are prefill rows from number `first` on."""
        whole = [segment for segment in ending if not segment.raw_past]
        if whole:
            places = [segment.places for segment in whole]
            tokens: Tensor | slice = slice(places[0].start, places[-1].stop)
            if any(one.stop != other.start for one, other in pairwise(places)):
                numbers = np.concatenate([np.arange(one.start, one.stop) for one in places])
                tokens = upload(numbers, self._pool.entries.device)
            starts = [segment.begin for segment in whole]
            yield WholeChunks(slice(first, first + len(whole)), starts, tokens)
        for number, segment in enumerate(ending[len(whole) :], first + len(whole)):
            noted = None
            if self._store is not None:
                blocks = self._raw_blocks(segment, cells)
                noted = self._store.find(blocks, 0, segment.raw_past)
            held = self._hold([segment], [tables[segment]], segment.raw_past)
            yield OpenChunk(number, segment, held, noted)

    def _defer(self, filled: Sequence[Segment], tables: Mapping[Segment, int]) -> DecodedChunks:
        """The chunks that `filled` end, by tables that stay until the next step."""
        prefill = self._prefill([], filled, tables, 0)
        read = [tables[segment] for segment in filled]
        held = self._hold(filled, read, self._chunk_tokens)
        starts = [each.chunk * self._chunk_tokens for each in filled]
        return DecodedChunks(PassAddresses(self._lengths.copy(), None, prefill), held, starts)

    def _hold(self, segments: Sequence[Segment], tables: Sequence[int], count: int) -> HeldTokens:
        """n = N · count: the first `count` tokens of the chunk of each of N segments, all raw."""
        pasts = self._pasts(segments, tables, raw=False)
        inside = pasts["length"][..., None] + np.arange(count)
        page, place = np.divmod(inside, self._slab.layout.page_tokens)
        layers, _, heads = pasts.shape
        pages = (pasts["table"][..., None] + page).swapaxes(1, 2).reshape(layers, heads, -1)
        # A chunk's pages are whole, so that tokens have the same places in those of all heads.
        arrays = pages, pasts["column"][:, 0, :, None].astype(np.int64), place[0, :, 0].ravel()
        return HeldTokens(*(upload(each, self._pool.entries.device) for each in arrays))

    def _note(self, segments: Iterable[Segment], cells: Tensor) -> Noting | None:
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
            np.arange(each.places.stop - places.shape[1], each.places.stop)
            for each, (_, places) in zip(noted, found, strict=True)
        ]
        places = torch.cat([places for _, places in found], dim=1)
        return Noting(
            upload(np.concatenate(tokens), places.device), found[0]._replace(places=places)
        )

    def _raw_blocks(self, segment: Segment, cells: Tensor) -> Tensor:
        first = segment.chunk * self._slab.columns
        return cells[segment.row, first : first + self._slab.raw_blocks]

    @property
    def _chunk_tokens(self) -> int:
        return self._slab.layout.chunk_tokens

    def _order(
        self, decode: Sequence[Segment], rest: Sequence[Segment], width: int
    ) -> TokenOrder | None:
        """The tokens of `decode`, padded to `width`, and those of `rest`."""
        places = [np.arange(each.first, each.first + each.tokens) for each in (*decode, *rest)]
        tokens = np.concatenate(places)
        padding = width - sum(segment.tokens for segment in decode)
        follow = bool((np.diff(tokens) == 1).all())
        if not padding and follow:
            return None
        begin = width - padding
        back = np.empty_like(tokens)
        back[tokens] = np.arange(len(tokens)) + padding * (np.arange(len(tokens)) >= begin)
        tokens = np.insert(tokens, begin, np.zeros(padding, np.int64))
        device = self._pool.entries.device
        pads = follow and not rest
        return TokenOrder(upload(tokens, device), upload(back, device), pads)

    def _decode(
        self, segments: Sequence[Segment], tables: Mapping[Segment, int], cells: Tensor, padded: int
    ) -> DecodedRows:
        """The rows that decode, under their plan; as many as `padded`, if it is not 0."""
        layout = self._slab.layout
        counts = np.array([segment.tokens for segment in segments], np.int32)
        read = np.array([tables[segment] for segment in segments])
        chunks, raw = np.divmod([segment.end - 1 for segment in segments], self._chunk_tokens)
        self._lengths[read] = layout.lengths(chunks, raw + 1)
        queries = int(counts.max())
        blocks = np.zeros((len(segments), 0), np.int32)
        if self._shares:
            sealed = slice(self._slab.columns - 1, None, self._slab.columns)
            rows = [segment.row for segment in segments]
            blocks = cells.numpy(force=True)[rows, sealed]
        known = queries, read.tobytes(), chunks.tobytes(), blocks.tobytes()
        planned = self._planned
        if planned is None or planned.rows != known or (raw < planned.raw).any():
            batch = self._batch(read, blocks, chunks, raw, queries)
            planned = KeptPlan(known, raw, batch, self._kernels.plan(batch)[0])
            self._planned = planned
        width = padded or self._kernels.width(int(counts.sum()), queries)
        return DecodedRows.of(planned.batch, planned.plan, counts, width)

    def _batch(
        self, tables: Int64, blocks: Int32, chunks: Int64, raw: Int64, queries: int
    ) -> Decoding:
        """The rows that read `tables` [R]; `blocks` [R, n] are those of sealed chunks, if known."""
        layout, geometry = self._slab.layout, self._slab.layout.geometry
        first = layout.head_address.view(ADDRESS)[..., 0]
        address = np.empty((geometry.layers, len(tables), geometry.kv_heads), ADDRESS)
        address["table"] = first["table"][:, None] + (tables * self._tables.width)[:, None]
        address["column"] = first["column"][:, None]
        address["length_index"] = (
            first["length_index"][:, None] + (tables * self._lengths.shape[1])[:, None]
        )
        grown = layout.lengths(chunks, np.minimum(raw + GROWTH_TOKENS, self._chunk_tokens))
        budget = grown[:, layout.head_group]
        decode = DecodeRows(address, budget, geometry.windows, layout.page_tokens)
        kept = np.broadcast_to(layout.head_kept_tokens, decode.shape)
        prefixes = partial(_find_prefixes, blocks, np.minimum(chunks, blocks.shape[1]))
        lengths, group = self._lengths.flatten(), geometry.group_size
        return Decoding(decode, lengths, group, kept, prefixes, queries)

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
        chunk = self._chunk_tokens
        for number, segment in enumerate(ending, len(segments)):
            spans[number] = 0, 0, 0, chunk, segment.chunk * chunk
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
            addressed["table"] = heads["table"] + table * self._tables.width
            addressed["column"] = heads["column"]
            past = layout.lengths(segment.chunk, segment.raw_past if raw else 0)
            addressed["length"] = past[layout.head_group]
        return pasts


def _find_prefixes(blocks: Int32, chunks: Int64) -> Forest:
    """The prefix forest: which rows share which sealed chunks, by their `blocks` [R, n]."""
    rows, nothing = np.arange(len(blocks)), np.zeros(len(blocks), np.int64)
    # A block is the one page of its chunk here.
    units = units_of(blocks.ravel(), rows * blocks.shape[1], nothing + 1, chunks, nothing)
    return build_forest(*units, chunks)
