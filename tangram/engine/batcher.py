"""Build the attention of a forward pass from a step's rows: addresses, lengths, decode plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.compress.scorers import Scorer
from tangram.engine.meters import Meters
from tangram.errors import IntegrityError
from tangram.kernels.host_forms import HostForm
from tangram.kernels.interface import PaddedShape, PoolKernels, PrefillRows
from tangram.kernels.transfer import place
from tangram.model.attention import RepeatAttention, StepAttention
from tangram.model.rotary import Rotary
from tangram.model.sealing import (
    ChunkSealer,
    GroupSealer,
    ScoreObserver,
    ScoreReceiver,
    find_group_scores,
)
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows
from tangram.plan.loops import address_rows
from tangram.plan.schedule import Decoding
from tangram.types import Int32, Int64

WHOLE_ROW = 16  # a block table with at least this part written is copied as a whole
GROWTH_TOKENS = 128  # assumed growth of a row in the first half of a plan's life
# Prefill rows that get a pass of their own, and their tokens. Graphs launch such passes faster than
# the host launches one for all. With more rows the device is busy so long that it does not matter
# (H200).
MOST_APART, MOST_TOKENS_APART = 4, 2048
LEAST_PADDED_TOKENS = 64


class BlockTables(Protocol):
    """Block tables, as `CacheManager` and `PartTables` have them."""

    tables: Int32
    lengths: Int32
    follower: Callable[[int, Int64], None] | None

    def past_lengths(self, slot: int, layout: Layout, position: int) -> Int32:
        """[groups]: the entries that each member head has of the tokens before `position`."""
        ...


class DeviceTables:
    """Block tables on the pool's device: a copy of those of `cache` that follows every write.

    In host memory they are the same tables.
    """

    def __init__(self, cache: BlockTables, device: torch.device) -> None:
        self._host, self._device = cache.tables, torch.from_numpy(cache.tables).to(device)
        self._written: dict[int, list[Int64]] = {}
        if not self._device.is_cpu:
            cache.follower = lambda slot, entries: self._written.setdefault(slot, []).append(
                entries
            )

    def flat(self) -> Tensor:
        """int32 [slots · width]: the current block tables of all sequences, end to end."""
        if self._written:
            width, places, rows = self._host.shape[1], [], []
            for slot, parts in self._written.items():
                if sum(map(len, parts)) * WHOLE_ROW > width:
                    rows.append(slot)
                else:
                    places += [slot * width + entries for entries in parts]
            self._written.clear()
            self._copy_places(places)
            self._copy_rows(rows)
        return self._device.view(-1)

    def _copy_places(self, places: list[Int64]) -> None:
        """A place that was written twice is copied twice, with its current value."""
        if places:
            where = np.concatenate(places)
            target, pages = place(
                np.stack([where, self._host.ravel().take(where)]), self._device.device
            )
            # Their low halves: a conversion would be a launch at every step.
            self._device.view(-1).index_copy_(0, target, pages.view(torch.int32)[::2])

    def _copy_rows(self, slots: list[int]) -> None:
        if slots:
            target = place(np.asarray(slots), self._device.device)
            self._device.index_copy_(0, target, place(self._host[slots], self._device.device))


@dataclass
class Batcher:
    """Builds the attention of each step for the kernels of one pool.

    `scorers` are those of all retentions, by name; each scores the chunks of its own. The decode
    plan is made when the decode membership changes (`Step.epoch`), and stays valid while lengths
    grow. A decode row may have as many tokens as the last of `queries`; its kernels are those of
    the next larger number. Sealed chunks are rounded to `form`.
    """

    retentions: Sequence[Retention]
    scorers: Mapping[str, Scorer]
    kernels: PoolKernels
    cache: BlockTables
    tables: DeviceTables
    rotary: Rotary | None
    meters: Meters
    observer: ScoreObserver | None = None
    queries: Sequence[int] = (1,)
    form: HostForm | None = None
    _epoch: int | None = field(default=None, init=False)
    _batches: dict[int, Decoding] = field(default_factory=dict, init=False)
    _loaded: tuple[int, int] | None = field(default=None, init=False)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens."""
        return self.retentions[0].layout.geometry.windows

    def passes(self, step: Step, graphs: bool) -> list[tuple[tuple[Row, ...], bool]]:
        """The rows of each forward pass of `step`, and whether a graph may replay it.

        All rows go in one pass, unless there are `graphs` and few prefill rows. Then the decode
        rows go in one, and each prefill row in a pass of its own.
        """
        decode, rest = step.rows[: step.decode_rows], step.rows[step.decode_rows :]
        if not graphs or not self.apart(rest):
            return [(step.rows, False)]
        return [(rows, True) for rows in (decode, *((row,) for row in rest)) if rows]

    def attention(self, rows: Sequence[Row], epoch: int, *, padded: bool = False) -> StepAttention:
        """The attention of a pass of `rows`, whose pages the scheduler has taken.

        DECODE rows come first; `epoch` identifies the set of them. A `padded` pass of one prefill
        row has a `PaddedShape`, if the kernels can.
        """
        decode = [row for row in rows if row.kind is RowKind.DECODE]
        rest = rows[len(decode) :]
        counts = np.array([len(row.tokens) for row in decode], np.int32)
        width = self._load(decode, counts, epoch) if decode else 0
        prefill = self._prefill_rows(rest, width)
        shape = self._padded_shape(rest[0]) if padded and not decode else None
        is_padded = self._begin(width, counts, prefill, shape)
        sealers = list(self._sealers(rest))
        return StepAttention(
            self.kernels,
            self.windows,
            width,
            prefill,
            sealers,
            self.meters.sealing,
            shape.tokens if shape is not None and is_padded else None,
            form=self.form,
            sealed=[
                slice(*span[:2])
                for row, span in zip(rest, prefill.spans.tolist(), strict=True)
                if row.kind is RowKind.SEAL
            ],
        )

    def _load(self, decode: Sequence[Row], counts: Int32, epoch: int) -> int:
        """Load a plan for `decode`, of `counts` tokens, unless it is loaded; returns the width."""
        most = int(counts.max())
        queries = next(number for number in self.queries if number >= most)
        width = self.kernels.width(int(counts.sum()), queries)
        if epoch != self._epoch:
            self._epoch, self._loaded = epoch, None
            self._batches.clear()
        planned = queries in self._batches
        if not planned:
            known = next(iter(self._batches.values()), None)
            self._batches[queries] = (
                self._decoding(decode, self.cache.tables, self.cache.lengths, queries)
                if known is None
                else replace(known, queries=queries)
            )
        if self._loaded != (width, queries):
            planner = self.kernels.load(self._batches[queries], width)
            self.meters.plans[planner] += not planned
            self._loaded = width, queries
        return width

    def _padded_shape(self, row: Row) -> PaddedShape:
        """The shape of a padded prefill row: tokens rounded to a power of two, the longest past."""
        layout = row.retention.layout
        tokens = len(row.tokens)
        if row.kind is RowKind.TAIL:
            tokens = max(LEAST_PADDED_TOKENS, 1 << (tokens - 1).bit_length())
        past = int(layout.lengths(*divmod(layout.max_tokens - 1, layout.chunk_tokens)).max())
        return PaddedShape(tokens, past, (row.retention, row.kind))

    def apart(self, rows: Sequence[Row]) -> bool:
        """Whether each prefill row of `rows` is a pass of its own, which a graph can replay."""
        if not rows:
            return True
        few = len(rows) <= MOST_APART and sum(len(row.tokens) for row in rows) <= MOST_TOKENS_APART
        if not few or self.meters.overflow is not None:
            return False
        return all(sealer.replayable for sealer in self._sealers(rows))

    def typical(self) -> Iterator[Row]:
        """Artificial prefill rows of the default ρ for every `PaddedShape`: a chunk and tails.

        Empty if these are not `apart`.
        """
        chunk, nothing = self.retentions[0].layout.chunk_tokens, np.zeros(0, np.int64)
        sizes = [
            1 << bits
            for bits in range(LEAST_PADDED_TOKENS.bit_length() - 1, (chunk - 1).bit_length() + 1)
        ]
        tails = sorted({min(size, chunk - 1) for size in sizes})
        for kind, size in ((RowKind.SEAL, chunk), *((RowKind.TAIL, size) for size in tails)):
            tokens = np.zeros(size, np.int64)
            row = Row("", 0, self.retentions[0], kind, chunk, tokens, nothing, sample=True)
            if size and self.apart((row,)):
                yield row

    def rehearse(self, tokens: int, queries: int = 1, *, shares: bool = False) -> StepAttention:
        """The attention of `tokens` tokens, up to `queries` of each of some empty sequences.

        These are planned as long ones: of several lengths that share nothing, or alike ones that
        share prefixes.
        """
        most = self.retentions[0].layout.max_tokens
        rows = min(tokens, len(self.cache.lengths))
        starts = np.linspace(most - queries, most // 8, rows, dtype=np.int64)
        if shares:
            starts[:] = most // 2
        width = self.kernels.width(tokens, queries)
        self.kernels.load(self._make_rows(starts, queries, shares=shares), width)
        counts = np.full(rows, tokens // rows, np.int32)
        counts[: tokens % rows] += 1
        return self._rehearse(width, counts)

    def rehearsals(self, rows: int) -> Iterator[StepAttention]:
        """The attention of `rows` empty decoding rows, under plans that launch every kernel."""
        for queries in self.queries:
            width = self.kernels.width(rows, queries)
            batch = self._make_rows(np.zeros(rows, np.int64), queries)
            for _ in self.kernels.rehearsals(batch, width):
                yield self._rehearse(width, np.ones(rows, np.int32))

    def _make_rows(self, starts: Int64, queries: int, *, shares: bool = False) -> Decoding:
        """Rows of sequences at `starts` that share nothing, or prefixes."""
        default, nothing = self.retentions[0], np.zeros(0, np.int64)
        layout, rows = default.layout, len(starts)
        rehearsed = [
            Row("", slot, default, RowKind.DECODE, start, nothing, nothing, sample=True)
            for slot, start in enumerate(starts.tolist())
        ]
        lengths = np.zeros_like(self.cache.lengths)
        lengths[:rows, : len(layout.groups)] = layout.lengths(
            *np.divmod(starts, layout.chunk_tokens)
        )
        apart = np.arange(self.cache.tables.size, dtype=np.int32).reshape(self.cache.tables.shape)
        self._epoch = None
        made = self._decoding(rehearsed, apart, lengths, queries)
        chunks = starts // layout.chunk_tokens
        return replace(made, prefixes=partial(_share_prefixes, chunks)) if shares else made

    def _rehearse(self, width: int, counts: Int32) -> StepAttention:
        prefill = self._prefill_rows((), width)
        self._begin(width, counts, prefill)
        return StepAttention(self.kernels, self.windows, width, prefill, (), self.meters.sealing)

    def repetition(
        self, attention: StepAttention, sealer: ChunkSealer, tokens: int
    ) -> RepeatAttention:
        """The attention of a second pass of `tokens` tokens for a chunk that waits.

        The chunk belongs to the step of `attention`.
        """
        repeated = attention.prefill.repeat_row(sealer.number, tokens)
        self._begin(0, np.zeros(0, np.int32), repeated)
        return RepeatAttention(self.kernels, self.windows, sealer, self.meters.sealing)

    def _begin(
        self, width: int, counts: Int32, prefill: PrefillRows, shape: PaddedShape | None = None
    ) -> bool:
        """Begin a pass; returns whether it is padded to `shape`."""
        tables = self.tables.flat()
        if shape is not None and self.kernels.begin_row(tables, prefill, shape):
            return True
        self.kernels.begin(tables, self.cache.lengths, width, counts, prefill)
        return False

    def advance(self, slots: Tensor, growth: Tensor) -> None:
        """Prepare another pass of the last pass's decode rows (`PoolKernels.advance`).

        `growth` int32 [n] are the tokens by which those in `slots` int64 [n] have grown.
        """
        self.tables.flat()
        self.kernels.advance(slots, growth)

    def _address(self, row: Row) -> Int64:
        """[L, H, 2]: table offset and column of the row's heads."""
        table = np.array([row.slot * self.cache.tables.shape[1], 0])
        return np.asarray(row.retention.layout.head_address[..., :2] + table)

    def _decoding(
        self, rows: Sequence[Row], tables: Int32, lengths: Int32, queries: int
    ) -> Decoding:
        """`rows` over block `tables` and `lengths`, which have one line for each slot."""
        one, slots = rows[0].retention.layout, len(self.cache.lengths)
        kept = one.head_kept_tokens
        if len({row.retention for row in rows}) > 1:
            kept = np.stack([row.retention.layout.head_kept_tokens for row in rows])
        decode = self._decode_rows(rows)
        prefixes = partial(_prefixes, rows, decode.table, tables.reshape(-1))
        kept, group = np.broadcast_to(kept, decode.shape), one.geometry.group_size
        return Decoding(decode, lengths.reshape(-1), group, kept, prefixes, queries, slots)

    def _decode_rows(self, rows: Sequence[Row]) -> DecodeRows:
        slots, start = np.array([(row.slot, row.start) for row in rows]).T
        first = self.retentions[0].layout
        layers, heads = first.head_group.shape
        address = np.empty((layers, len(rows), heads, 3), np.int32)
        budget = np.empty((len(rows), layers, heads), np.int32)
        retentions = [row.retention for row in rows]
        for retention in set(retentions):
            own = np.flatnonzero([one is retention for one in retentions])
            layout, slot = retention.layout, slots[own]
            table, index = (slot * x.shape[1] for x in (self.cache.tables, self.cache.lengths))
            entries = _estimate_entries(layout, start[own])
            address_rows(layout.head_address, own, table, index, entries, address, budget)
        return DecodeRows(address, budget, self.windows, first.page_tokens)

    def _prefill_rows(self, rows: Sequence[Row], first: int) -> PrefillRows:
        """The prefill rows `rows`, end to end in the flattened batch from token `first` on."""
        geometry = self.retentions[0].layout.geometry
        address = np.empty((geometry.layers, len(rows), geometry.kv_heads, 3), np.int32)
        spans = np.empty((len(rows), 5), np.int32)
        kept, first_kept = (np.empty(address.shape[:3], np.int32) for _ in range(2))
        for number, row in enumerate(rows):
            layout = row.retention.layout
            past = self.cache.past_lengths(row.slot, layout, row.start)
            address[:, number, :, :2] = self._address(row)
            address[:, number, :, 2] = past[layout.head_group]
            spans[number] = (
                first,
                first + len(row.tokens),
                first,
                first + len(row.tokens),
                row.start,
            )
            kept[:, number] = self._count_stored_tokens(row)
            sealed = row.kind is RowKind.SEAL and row.retention.draft is not None
            first_kept[:, number] = row.retention.head_first_tokens if sealed else kept[:, number]
            first += len(row.tokens)
        return PrefillRows(address, spans, kept, first_kept, slice(0, len(rows)))

    def _count_stored_tokens(self, row: Row) -> Int32 | int:
        """Entries that the pass stores of a prefill row: [L, H], or one number for every head."""
        return (
            row.retention.layout.head_kept_tokens if row.kind is RowKind.SEAL else len(row.tokens)
        )

    def _sealers(self, rows: Sequence[Row]) -> Iterator[ChunkSealer | GroupSealer]:
        """The sealers of `rows`; consecutive ones share a sealer where the kernels can."""
        for (retention, kind), group in groupby(
            range(len(rows)), lambda at: (rows[at].retention, rows[at].kind)
        ):
            if kind is RowKind.SEAL and retention.scorer is not None:
                yield from self._sealers_of(retention, rows, list(group))

    def _sealers_of(
        self, retention: Retention, rows: Sequence[Row], numbers: Sequence[int]
    ) -> Iterator[ChunkSealer | GroupSealer]:
        """The sealers of the chunks `numbers` of `rows`, consecutive and of one retention."""
        scorer = self._scorer_of(retention)
        scores = find_group_scores(scorer, self.kernels)
        apart = self.observer is not None or not retention.orders
        receivers = {at: self._receiver(rows[at]) for at in numbers}
        if scores is None or apart:
            for at in numbers:
                yield self._chunk_sealer(scorer, rows[at], at, receivers[at])
            return
        asked = {at - numbers[0]: one for at, one in receivers.items() if one is not None}
        span = slice(numbers[0], numbers[-1] + 1)
        yield GroupSealer(retention, self.kernels, scores, span, asked)

    def _scorer_of(self, retention: Retention) -> Scorer:
        scorer = None if retention.scorer is None else self.scorers.get(retention.scorer)
        if scorer is None:
            raise IntegrityError(f"a chunk must be scored by {retention.scorer}, which is not here")
        return scorer

    def _chunk_sealer(
        self, scorer: Scorer, row: Row, number: int, receiver: ScoreReceiver | None
    ) -> ChunkSealer:
        rotary = self.rotary if "rotary" in scorer.needs else None
        return ChunkSealer(scorer, self.kernels, row, number, rotary, self.observer, receiver)

    def _receiver(self, row: Row) -> ScoreReceiver | None:
        overflow = self.meters.overflow
        return None if overflow is None else overflow.sample(row.retention, row.start)


def _prefixes(rows: Sequence[Row], table: Int32, tables: Int32) -> Forest:
    """The prefix forest as one head of `table` [R, L, H] shows it.

    It consists of sealed chunks and the full pages of raw tails.
    """
    full = rows[0].retention.layout.geometry.full_layers
    probe = full[0] if full else 0
    retentions = [row.retention for row in rows]
    sizes = {retention: _size_units(retention.layout, probe) for retention in set(retentions)}
    chunk_tokens, page_tokens, pages = np.array([sizes[one] for one in retentions]).T
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
