"""The steps of one model on several devices: rank 0 tells them, every rank computes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables, TableWrite
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.cache.write_log import WriteLog
from tangram.compress.scorers import Scorer
from tangram.engine.draft_round import DraftPasses
from tangram.engine.passes import Carry, Passes
from tangram.engine.ranks import Ranks
from tangram.engine.runner import Runner
from tangram.engine.sampling import SampledTokens, SampleRow
from tangram.engine.self_drafts import draft_row, set_draft_positions
from tangram.errors import IntegrityError
from tangram.kernels.interface import KernelChoice
from tangram.model.load import LoadedModel
from tangram.types import Int32, Int64, PageMove


@dataclass(frozen=True)
class RankRow:
    """A `Row` in numbers: what ranks need of it, its retention by number."""

    slot: int
    retention: int
    kind: str
    start: int
    tokens: Int64
    preceding: Int64
    sample: bool
    pending: bool


@dataclass(frozen=True)
class RankStep:
    """A `Step`, and what was entered in the block tables since the one before."""

    rows: tuple[RankRow, ...]
    epoch: int
    moves: tuple[PageMove, ...]
    awaited: bool
    writes: tuple[TableWrite, ...]


@dataclass(frozen=True)
class RankClear:
    """The ranks fill `pages` [n] with zeros."""

    pages: Int32


@dataclass(frozen=True)
class RankMoves:
    """The ranks move pages to host memory and back, as `Step` says."""

    moves: tuple[PageMove, ...]
    awaited: bool


@dataclass(frozen=True)
class RankDrafts:
    """The ranks decode `rows`, and then the drafts that rank 0 chooses, `counts` int64 [n] of them.

    `epoch` is that of the drafting sequences, `writes` are as in `RankStep`.
    """

    rows: tuple[RankRow, ...]
    counts: Int64
    epoch: int
    writes: tuple[TableWrite, ...]


class RankRunner(Runner):
    """A `Runner` of the heads of one rank.

    `shares` has the rank's retention for each of those that sequences carry; `cache` are the tables
    of its part. After `lead` it takes steps of sequences and tells them to the other ranks. Before,
    and on the others, it takes steps of its own retentions (`follow`).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scorers: Mapping[str, Scorer],
        *,
        shares: Mapping[Retention, Retention],
        cache: PartTables,
        **options: Any,
    ) -> None:
        super().__init__(loaded, list(shares.values()), scorers, cache=cache, **options)
        self._common, self._shares, self._tables = list(shares), shares, cache
        self._ranks: Ranks | None = None
        self._written: WriteLog | None = None
        self._drafts: tuple[Passes, PartTables] | None = None

    def lead(self, ranks: Ranks, cache: CacheManager) -> None:
        """From now on tell steps to `ranks`. `cache` manages the page numbers of all ranks."""
        self._ranks, self._written = ranks, WriteLog(cache, self._common)
        ranks.release_by(self._forget_graphs)

    def _forget_graphs(self) -> None:
        for passes in (self.passes, *(() if self._drafts is None else self._drafts[:1])):
            if passes.graphs is not None:
                passes.graphs.forget()

    def run(
        self,
        step: Step,
        sample_rows: Sequence[SampleRow],
        before_choosing: Callable[[], object] = lambda: None,
        drafted: Tensor | None = None,
    ) -> SampledTokens | None:
        """See `Runner`."""
        if self._ranks is None:
            return super().run(step, sample_rows, before_choosing, drafted)
        told = self._number(step)
        with self._ranks.computing(told):
            return super().run(self._enter(told), sample_rows, before_choosing, drafted)

    def draft_passes(
        self, retention: Retention, tables: PartTables, kernels: KernelChoice
    ) -> Passes:
        """See `Runner`. All ranks call it, and compute these passes together."""
        passes = super().draft_passes(retention, tables, kernels)
        self._drafts = passes, tables
        return passes

    @contextmanager
    def drafting(self, rows: Sequence[Row], counts: Int64, epoch: int) -> Iterator[None]:
        """Rank 0 drafts inside, and the others with it. It broadcasts each token that it chooses.

        `rows` are the decode rows of the step that verifies `counts` int64 [n] drafts. Raises
        `IntegrityError` before `lead`.
        """
        if self._ranks is None:
            raise IntegrityError("a rank drafts before it leads")
        told = RankDrafts(self._number_rows(rows), counts, epoch, self._take_writes())
        with self._ranks.computing(told):
            self._copy(told.writes)
            yield

    def move(self, step: Step) -> None:
        """See `Runner`: on all ranks."""
        if self._ranks is None:
            super().move(step)
            return
        with self._ranks.computing(RankMoves(step.moves, step.awaited)):
            super().move(step)

    def clear(self, pages: Int32) -> None:
        """See `Runner`: on all ranks."""
        if self._ranks is None:
            super().clear(pages)
            return
        with self._ranks.computing(RankClear(pages)):
            super().clear(pages)

    def follow(self, told: RankStep | RankMoves | RankDrafts | RankClear) -> None:
        """Compute this rank's part of what rank 0 computes."""
        match told:
            case RankClear():
                self.clear(told.pages)
            case RankMoves():
                self.move(Step((), 0, told.moves, told.awaited))
            case RankDrafts():
                self._follow_drafts(told)
            case _:
                self.run(self._enter(told), [])
        self.collect()

    @torch.inference_mode()
    def _follow_drafts(self, told: RankDrafts) -> None:
        """Compute the passes of a round of drafts; rank 0 chooses the tokens."""
        if self._drafts is None:
            raise IntegrityError("a rank is told to draft that has no passes for it")
        self._copy(told.writes)
        passes, tables = self._drafts
        rows = [draft_row(self._row(row)) for row in told.rows]
        set_draft_positions(tables, rows)
        drafts = DraftPasses(passes, rows, told.counts, told.epoch)
        for _ in range(int(told.counts.max())):
            device = drafts.compute().device
            tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
            dist.broadcast(tokens, 0)
            drafts.take(tokens)

    def _number(self, step: Step) -> RankStep:
        rows, writes = self._number_rows(step.rows), self._take_writes()
        return RankStep(rows, step.epoch, step.moves, step.awaited, writes)

    def _number_rows(self, rows: Sequence[Row]) -> tuple[RankRow, ...]:
        return tuple(
            RankRow(
                row.slot,
                self._common.index(row.retention),
                row.kind.value,
                row.start,
                row.tokens,
                row.preceding,
                row.sample,
                row.pending,
            )
            for row in rows
        )

    def _take_writes(self) -> tuple[TableWrite, ...]:
        return () if self._written is None else self._written.take()

    def _copy(self, writes: Sequence[TableWrite]) -> None:
        """Enter `writes` in the tables of this rank; rank 0's cache enters those of its drafts."""
        self._tables.copy(writes, self._common)
        if self._drafts is not None and self._ranks is None:
            self._drafts[1].copy(writes, self._common)

    def _enter(self, told: RankStep) -> Step:
        """Write the tables of this rank; the step as it computes it."""
        self._copy(told.writes)
        rows = tuple(self._row(row) for row in told.rows)
        alike: dict[Retention, list[tuple[int, int, int]]] = {}
        for row in rows:
            if row.kind is RowKind.DECODE:
                alike.setdefault(row.retention, []).append((row.slot, row.start, len(row.tokens)))
        for retention, own in alike.items():
            self._tables.set_positions(retention.layout, *np.array(own, np.int64).T)
        return Step(rows, told.epoch, told.moves, told.awaited)

    def _row(self, told: RankRow) -> Row:
        own = self._shares[self._common[told.retention]]
        kind, start = RowKind(told.kind), told.start
        tokens, preceding = told.tokens, told.preceding
        return Row("", told.slot, own, kind, start, tokens, preceding, told.sample, told.pending)

    def _carry(self, rows: Sequence[Row], ends: Int64, drafted: Tensor | None) -> Carry:
        """See `Runner`: rank 0 alone knows tokens that the host does not, and tells the others."""
        pending = any(row.pending for row in rows)
        known = super()._carry(rows, ends, drafted) if dist.get_rank() == 0 else None

        def carry(tokens: Tensor) -> None:
            if known is not None:
                known(tokens)
            if pending:
                dist.broadcast(tokens, 0)

        return carry
