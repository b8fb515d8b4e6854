"""The steps of one model on several devices: rank 0 tells them, every rank computes its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from tangram.engine.passes import Carry
from tangram.engine.ranks import Ranks
from tangram.engine.runner import Runner
from tangram.engine.sampling import SampledTokens, SampleRow
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
    """A `Step`, and what was entered in the block tables since the one before.

    With `tail` the ranks compute the logits of all tokens of its TAIL rows.
    """

    rows: tuple[RankRow, ...]
    epoch: int
    moves: tuple[PageMove, ...]
    awaited: bool
    writes: tuple[TableWrite, ...]
    tail: bool


@dataclass(frozen=True)
class RankClear:
    """The ranks fill `pages` [n] with zeros."""

    pages: Int32


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

    def lead(self, ranks: Ranks, cache: CacheManager) -> None:
        """From now on tell steps to `ranks`. `cache` manages the page numbers of all ranks."""
        self._ranks, self._written = ranks, WriteLog(cache, self._common)

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
        told = self._number(step, tail=False)
        with self._ranks.computing(told):
            return super().run(self._enter(told), sample_rows, before_choosing, drafted)

    @torch.inference_mode()
    def tail_logits(self, step: Step) -> Tensor:
        """See `Runner`."""
        if self._ranks is None:
            return super().tail_logits(step)
        told = self._number(step, tail=True)
        with self._ranks.computing(told):
            return super().tail_logits(self._enter(told))

    def clear(self, pages: Int32) -> None:
        """See `Runner`: on all ranks."""
        if self._ranks is None:
            super().clear(pages)
            return
        with self._ranks.computing(RankClear(pages)):
            super().clear(pages)

    def follow(self, told: RankStep | RankClear) -> None:
        """Compute this rank's part of what rank 0 computes."""
        if isinstance(told, RankClear):
            self.clear(told.pages)
        elif told.tail:
            self.tail_logits(self._enter(told))
        else:
            self.run(self._enter(told), [])
        self.collect()

    def _number(self, step: Step, *, tail: bool) -> RankStep:
        rows = tuple(
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
            for row in step.rows
        )
        writes = () if self._written is None else self._written.take()
        return RankStep(rows, step.epoch, step.moves, step.awaited, writes, tail)

    def _enter(self, told: RankStep) -> Step:
        """Write the tables of this rank; the step as it computes it."""
        self._tables.copy(told.writes, self._common)
        rows = tuple(self._row(row) for row in told.rows)
        for row in rows:
            if row.kind is RowKind.DECODE:
                slots, starts = np.array([row.slot]), np.array([row.start])
                self._tables.set_positions(row.retention.layout, slots, starts, len(row.tokens))
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
