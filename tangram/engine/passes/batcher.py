"""Builds passes from the rows of a step: tokens, addresses, lengths, the decode plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind
from tangram.engine.passes.device_tables import BlockTables
from tangram.engine.passes.forward_pass import Pass, flatten, seals_of
from tangram.engine.passes.meters import Meters
from tangram.kernels.interface import (
    DecodedRows,
    PaddedShape,
    PassAddresses,
    PoolKernels,
    PrefillRows,
)
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.loops import address_rows
from tangram.plan.records import ADDRESS, PAST, SPAN
from tangram.plan.schedule import Decoding
from tangram.types import Geometry, Int32, Int64

GROWTH_TOKENS = 128  # assumed growth of a row in the first half of a plan's life
LEAST_PADDED_TOKENS = 64


class Batcher:
    """Builds the passes of steps for the kernels of one pool.

    The decode plan is made when the decode membership changes (`Step.epoch`), and stays valid while
    lengths grow. A decode row may have as many tokens as the last of `queries`; its kernels are
    those of the next larger number.
    """

    def __init__(
        self,
        retentions: Sequence[Retention],
        kernels: PoolKernels,
        cache: BlockTables,
        meters: Meters,
        queries: Sequence[int] = (1,),
    ) -> None:
        self.retentions, self.queries = retentions, queries
        self._kernels, self._cache, self._meters = kernels, cache, meters
        self._epoch: int | None = None
        # Of the epoch, by queries of a row.
        self._planned: dict[int, tuple[Decoding, WorkPlan]] = {}

    @property
    def geometry(self) -> Geometry:
        """That of the model."""
        return self.retentions[0].layout.geometry

    def build(self, rows: Sequence[Row], epoch: int, *, padded: bool = False) -> Pass:
        """The pass of `rows`, whose pages the scheduler has taken.

        DECODE rows come first; `epoch` identifies the set of them. One prefill row may be `padded`.
        """
        decode = [row for row in rows if row.kind is RowKind.DECODE]
        rest, lengths = rows[len(decode) :], self._cache.lengths.copy()
        decoded = self._find_decoded(decode, lengths, epoch) if decode else None
        width = 0 if decoded is None else decoded.width
        shape = self._padded_shape(rest[0]) if padded and not decode else None
        prefill = self._prefill_rows(rest, width)
        addresses = PassAddresses(lengths, decoded, prefill, shape)
        return Pass(tuple(rows), *flatten(rows, len(decode), width), addresses, seals_of(rest))

    def _find_decoded(self, decode: Sequence[Row], lengths: Int32, epoch: int) -> DecodedRows:
        """The decode rows of a pass at `lengths`, under the plan of their set."""
        counts = np.array([len(row.tokens) for row in decode], np.int32)
        most = int(counts.max())
        queries = next(number for number in self.queries if number >= most)
        width = self._kernels.width(int(counts.sum()), queries)
        if epoch != self._epoch:
            self._epoch = epoch
            self._planned.clear()
        if queries not in self._planned:
            known = next(iter(self._planned.values()), None)
            batch = (
                self._decoding(decode, self._cache.tables, lengths, queries)
                if known is None
                else replace(known[0], lengths=lengths.reshape(-1), queries=queries)
            )
            plan, planner = self._kernels.plan(batch)
            self._planned[queries] = batch, plan
            self._meters.plans[planner] += 1
        return DecodedRows.of(*self._planned[queries], counts, width)

    def _padded_shape(self, row: Row) -> PaddedShape:
        """The shape of a padded prefill row: tokens rounded to a power of two, the longest past."""
        layout = row.retention.layout
        tokens = len(row.tokens)
        if row.kind is RowKind.TAIL:
            tokens = max(LEAST_PADDED_TOKENS, 1 << (tokens - 1).bit_length())
        past = int(layout.lengths(*divmod(layout.max_tokens - 1, layout.chunk_tokens)).max())
        return PaddedShape(tokens, past, (row.retention, row.kind))

    def typical(self) -> Iterator[Row]:
        """Artificial prefill rows of the default ρ for every `PaddedShape`: a chunk and tails."""
        chunk, nothing = self.retentions[0].layout.chunk_tokens, np.zeros(0, np.int64)
        sizes = [
            1 << bits
            for bits in range(LEAST_PADDED_TOKENS.bit_length() - 1, (chunk - 1).bit_length() + 1)
        ]
        tails = sorted({min(size, chunk - 1) for size in sizes})
        for kind, size in ((RowKind.SEAL, chunk), *((RowKind.TAIL, size) for size in tails)):
            tokens = np.zeros(size, np.int64)
            row = Row("", 0, self.retentions[0], kind, chunk, tokens, nothing, sample=True)
            if size:
                yield row

    def rehearsal(self, tokens: int, queries: int = 1, *, shares: bool = False) -> Pass:
        """A pass of `tokens` tokens, up to `queries` of each of some empty sequences.

        These are planned as long sequences: of several lengths that share nothing, or alike, with
        shared prefixes.
        """
        most = self.retentions[0].layout.max_tokens
        rows = min(tokens, len(self._cache.lengths))
        starts = np.linspace(most - queries, most // 8, rows, dtype=np.int64)
        if shares:
            starts[:] = most // 2
        counts = np.full(rows, tokens // rows, np.int32)
        counts[: tokens % rows] += 1
        batch = self._make_rows(starts, queries, shares)
        width = self._kernels.width(tokens, queries)
        decoded = DecodedRows.of(batch, self._kernels.plan(batch)[0], counts, width)
        nothing, ends = np.zeros(width, np.int64), np.zeros(0, np.int64)
        prefill = self._prefill_rows((), width)
        addresses = PassAddresses(self._cache.lengths.copy(), decoded, prefill)
        return Pass((), nothing, nothing, ends, np.arange(width), addresses, ())

    def _make_rows(self, starts: Int64, queries: int, shares: bool) -> Decoding:
        """Rows of sequences at `starts` that share nothing, or prefixes."""
        default, nothing = self.retentions[0], np.zeros(0, np.int64)
        layout, rows = default.layout, len(starts)
        rehearsed = [
            Row("", slot, default, RowKind.DECODE, start, nothing, nothing, sample=True)
            for slot, start in enumerate(starts.tolist())
        ]
        lengths = np.zeros_like(self._cache.lengths)
        lengths[:rows, : len(layout.groups)] = layout.lengths(
            *np.divmod(starts, layout.chunk_tokens)
        )
        apart = np.arange(self._cache.tables.size, dtype=np.int32).reshape(self._cache.tables.shape)
        made = self._decoding(rehearsed, apart, lengths, queries)
        chunks = starts // layout.chunk_tokens
        return replace(made, prefixes=partial(_share_prefixes, chunks)) if shares else made

    def _decoding(
        self, rows: Sequence[Row], tables: Int32, lengths: Int32, queries: int
    ) -> Decoding:
        """`rows` over block `tables` and `lengths`, which have one line for each slot."""
        layout = rows[0].retention.layout
        kept = layout.head_kept_tokens
        if len({row.retention for row in rows}) > 1:
            kept = np.stack([row.retention.layout.head_kept_tokens for row in rows])
        decode = self._decode_rows(rows)
        prefixes = partial(_prefixes, rows, decode.table, tables.reshape(-1))
        kept, group = np.broadcast_to(kept, decode.shape), layout.geometry.group_size
        return Decoding(decode, lengths.reshape(-1), group, kept, prefixes, queries)

    def _decode_rows(self, rows: Sequence[Row]) -> DecodeRows:
        slots, start = np.array([(row.slot, row.start) for row in rows]).T
        first = self.retentions[0].layout
        layers, heads = first.head_group.shape
        address = np.empty((layers, len(rows), heads), ADDRESS)
        budget = np.empty((len(rows), layers, heads), np.int32)
        for retention in {row.retention for row in rows}:
            alike = np.flatnonzero([row.retention is retention for row in rows])
            layout, slot = retention.layout, slots[alike]
            table, index = (slot * x.shape[1] for x in (self._cache.tables, self._cache.lengths))
            entries = _estimate_entries(layout, start[alike])
            first_slot = layout.head_address.view(ADDRESS)[..., 0]
            address_rows(first_slot, alike, table, index, entries, address, budget)
            if self.geometry.chunked:
                passed = layout.passed_pages(start[alike] // layout.chunk_tokens)
                address["table"][:, alike] += passed.T[layout.head_group].swapaxes(1, 2)
        return DecodeRows(address, budget, self.geometry.windows, first.page_tokens)

    def _prefill_rows(self, rows: Sequence[Row], first: int) -> PrefillRows:
        """The prefill rows `rows`, end to end in the flattened batch from token `first` on."""
        geometry = self.retentions[0].layout.geometry
        address = np.empty((geometry.layers, len(rows), geometry.most_kv_heads), PAST)
        spans = np.empty(len(rows), SPAN)
        kept, first_kept = (np.empty(address.shape, np.int32) for _ in range(2))
        for number, row in enumerate(rows):
            layout = row.retention.layout
            past = layout.lengths(*divmod(row.start, layout.chunk_tokens))
            passed = layout.passed_pages(row.start // layout.chunk_tokens)
            places, end = address[:, number], first + len(row.tokens)
            heads = layout.head_address.view(ADDRESS)[..., 0]
            table = row.slot * self._cache.tables.shape[1] + passed[layout.head_group]
            places["table"] = heads["table"] + table
            places["column"], places["length"] = heads["column"], past[layout.head_group]
            spans[number] = first, end, first, end, row.start
            seals = row.kind is RowKind.SEAL
            kept[:, number] = layout.head_kept_tokens if seals else len(row.tokens)
            drafted = seals and row.retention.draft is not None
            first_kept[:, number] = row.retention.head_first_tokens if drafted else kept[:, number]
            first = end
        return PrefillRows(address, spans, kept, first_kept, slice(0, len(rows)))


def _prefixes(rows: Sequence[Row], table: Int32, tables: Int32) -> Forest:
    """The prefix forest as one head of `table` [R, L, H] shows it.

    It consists of sealed chunks and the full pages of raw tails.
    """
    full = rows[0].retention.layout.geometry.full_layers
    probe = full[0] if full else 0
    sizes = {kept: _size_units(kept.layout, probe) for kept in {row.retention for row in rows}}
    chunk_tokens, page_tokens, pages = np.array([sizes[row.retention] for row in rows]).T
    chunks, raw = np.divmod(np.array([row.start if full else 0 for row in rows]), chunk_tokens)
    first = table[:, probe, 0]
    if len(set(tables[first].tolist())) == len(rows):  # no two rows begin with the same page
        return build_forest(np.zeros((len(rows), 0), np.int64), np.zeros_like(chunks), chunks)
    return build_forest(*units_of(tables, first, pages, chunks, raw // page_tokens), chunks)


def _share_prefixes(chunks: Int64) -> Forest:
    """The forest of rows with that many sealed `chunks` [R].

    All share half of the chunks of the shortest, and every four of them a quarter more.
    """
    rows, shared = np.arange(len(chunks)), int(chunks.min()) // 2
    units = np.broadcast_to(rows[:, None], (len(rows), int(chunks.max()))).copy()
    units[:, : shared + shared // 2] = len(rows) + rows[:, None] // 4
    units[:, :shared] = 2 * len(rows)
    return build_forest(units, chunks, chunks)


def _size_units(layout: Layout, probe: int) -> tuple[int, int, int]:
    """Tokens of a chunk and of a page, and the pages that stay of a chunk in layer `probe`."""
    pages = layout.sealed_pages[layout.head_group[probe, 0]]
    return layout.chunk_tokens, layout.page_tokens, int(pages)


def _estimate_entries(layout: Layout, positions: Int64) -> Int32:
    """[R, groups]: entries of rows at `positions` [R] in the middle of a plan's life.

    Sealing a chunk makes a new plan.
    """
    sealed, raw = np.divmod(positions, layout.chunk_tokens)
    return layout.lengths(sealed, np.minimum(raw + GROWTH_TOKENS, layout.chunk_tokens))
