"""The steps of one model on several devices: rank 0 tells them, every rank computes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch import distributed as dist

from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables, TableWrite
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.cache.write_log import WriteLog
from tangram.compress.scorers import Scorer
from tangram.engine.drafts.draft_round import DraftPasses
from tangram.engine.drafts.self_drafts import draft_row, set_draft_positions
from tangram.engine.passes.forward_pass import Pass, PlannedStep
from tangram.engine.passes.passes import Carry, Passes
from tangram.engine.passes.runner import Runner, RunnerSettings
from tangram.engine.ranks.rank_wire import (
    ClearOrder,
    DraftOrder,
    MoveOrder,
    Order,
    OrderCodec,
    RunOrder,
    StepOrder,
)
from tangram.engine.ranks.ranks import Ranks
from tangram.engine.sampling.sampler import SampledTokens, SampleRow
from tangram.errors import IntegrityError
from tangram.model.load import LoadedModel
from tangram.types import Int32, Int64


class RankRunner(Runner):
    """A `Runner` of the heads of one rank.

    `shares` has the rank's retention for each of those that sequences carry; `cache` are the tables
    of its part. After `lead` it tells what it computes to the other ranks, which `follow`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shares: Mapping[Retention, Retention],
        scorers: Mapping[str, Scorer],
        cache: PartTables,
        settings: RunnerSettings,
    ) -> None:
        super().__init__(loaded, list(shares.values()), scorers, cache, settings)
        self._shares, self._tables = shares, cache
        self._codec = OrderCodec(list(shares))
        self._ranks: Ranks | None = None
        self._written: WriteLog | None = None
        self._drafts: tuple[Passes, PartTables] | None = None
        self._planned: PlannedStep | None = None

    def lead(self, ranks: Ranks, cache: CacheManager) -> None:
        """From now on tell steps to `ranks`. `cache` manages the page numbers of all ranks."""
        self._ranks, self._written = ranks, WriteLog(cache)
        ranks.release_by(self._forget_graphs)

    def _forget_graphs(self) -> None:
        for passes in (self.passes, *(() if self._drafts is None else self._drafts[:1])):
            if passes.graphs is not None:
                passes.graphs.forget()

    def plan(self, step: Step) -> PlannedStep:
        """See `Runner`: the passes of this rank's part. The others plan at the same time."""
        order = StepOrder(step, self._take_writes())
        with self._telling(order):
            return replace(self.passes.plan(self._enter(order)), step=step)

    def run(
        self,
        planned: PlannedStep,
        sample_rows: Sequence[SampleRow],
        before_choosing: Callable[[], object] = lambda: None,
        asked: Sequence[int] = (),
    ) -> SampledTokens | None:
        """See `Runner`."""
        with self._telling(RunOrder()):
            return super().run(planned, sample_rows, before_choosing, asked)

    @contextmanager
    def _telling(self, order: Order) -> Iterator[None]:
        """Rank 0 computes inside, and the others with it."""
        if self._ranks is None:
            yield
            return
        with self._ranks.computing(self._codec.encode(order)):
            yield

    def draft_passes(self, retention: Retention, tables: PartTables) -> Passes:
        """See `Runner`. All ranks call it, and compute these passes together."""
        passes = super().draft_passes(retention, tables)
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
        order = DraftOrder(tuple(rows), counts, epoch, self._take_writes())
        with self._telling(order):
            self._copy(order.writes)
            yield

    def move(self, step: Step) -> None:
        """See `Runner`: on all ranks."""
        with self._telling(MoveOrder(Step((), 0, step.moves, step.awaited))):
            super().move(step)

    def clear(self, pages: Int32) -> None:
        """See `Runner`: on all ranks."""
        with self._telling(ClearOrder(pages)):
            super().clear(pages)

    def follow(self, told: bytes) -> None:
        """Compute this rank's part of what rank 0 computes, and has told."""
        match order := self._codec.decode(told):
            case ClearOrder():
                self.clear(order.pages)
            case MoveOrder():
                self.move(order.step)
            case DraftOrder():
                self._follow_drafts(order)
            case StepOrder():
                self._planned = self.passes.plan(self._enter(order))
            case RunOrder():
                if self._planned is None:
                    raise IntegrityError("a rank is told to run a step that it has not planned")
                self.run(self._planned, [])
        self.collect()

    @torch.inference_mode()
    def _follow_drafts(self, order: DraftOrder) -> None:
        """Compute the passes of a round of drafts; rank 0 chooses the tokens."""
        if self._drafts is None:
            raise IntegrityError("a rank is told to draft that has no passes for it")
        self._copy(order.writes)
        passes, tables = self._drafts
        rows = [draft_row(self._localize(row)) for row in order.rows]
        set_draft_positions(tables, rows)
        drafts = DraftPasses(passes, rows, order.counts, order.epoch)
        for _ in range(int(order.counts.max())):
            device = drafts.compute().device
            tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
            dist.broadcast(tokens, 0)
            drafts.take(tokens)

    def _take_writes(self) -> tuple[TableWrite, ...]:
        return () if self._written is None else self._written.take()

    def _copy(self, writes: Sequence[TableWrite]) -> None:
        """Enter `writes` in the tables of this rank; rank 0's cache enters those of its drafts."""
        self._tables.copy(writes)
        if self._drafts is not None and self._ranks is None:
            self._drafts[1].copy(writes)

    def _enter(self, order: StepOrder) -> Step:
        """Write the tables of this rank; the step as it computes it."""
        self._copy(order.writes)
        rows = tuple(self._localize(row) for row in order.step.rows)
        alike: dict[Retention, list[tuple[int, int, int]]] = {}
        for row in rows:
            if row.kind is RowKind.DECODE:
                alike.setdefault(row.retention, []).append((row.slot, row.start, len(row.tokens)))
        for retention, places in alike.items():
            self._tables.set_positions(retention.layout, *np.array(places, np.int64).T)
        return replace(order.step, rows=rows)

    def _localize(self, row: Row) -> Row:
        """`row` with what this rank keeps of it."""
        return structs.replace(row, retention=self._shares[row.retention])

    def _carry(self, work: Pass, drafted: Tensor | None) -> Carry:
        """See `Runner`: rank 0 alone knows tokens that the host does not, and tells the others."""
        pending = any(row.pending for row in work.rows)
        known = super()._carry(work, drafted) if dist.get_rank() == 0 else None

        def carry(tokens: Tensor) -> None:
            if known is not None:
                known(tokens)
            if pending:
                dist.broadcast(tokens, 0)

        return carry
