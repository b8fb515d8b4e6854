"""Drafts that the model makes itself, reading only the entries that are stored first.

What a draft pass writes is overwritten: the step that follows computes the same positions from all
entries, before anything reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tangram.cache.part_tables import PartTables
from tangram.cache.step import Row
from tangram.engine.drafts.draft_round import DraftRound
from tangram.engine.drafts.speculation import Drafting
from tangram.engine.passes.passes import Passes
from tangram.engine.schedule.rows import Membership
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.errors import IntegrityError


class SelfDrafter:
    """A `Drafter` whose `passes` decode over `tables` of the serving cache."""

    def __init__(self, passes: Passes, tables: PartTables) -> None:
        self._passes, self._tables = passes, tables
        self._membership = Membership()
        self.cache = None

    def prepare(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """See `Drafter`: what it reads is in the serving cache."""
        return ()

    def serves(self, sequence: TokenSequence) -> bool:
        """See `Drafter`: where the sequence's cache has a draft."""
        return sequence.retention.draft is not None

    def offer(self, sequence: TokenSequence, most: int) -> int:
        """See `Drafter`: all."""
        return most if self.serves(sequence) else 0

    @torch.inference_mode()
    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """See `Drafter`."""
        rows = [draft_row(each.row) for each in drafting]
        set_draft_positions(self._tables, rows)
        epoch, vocabulary = self.epoch_of(drafting), rows[0].retention.layout.geometry.vocab_size
        drafts = DraftRound(self._passes, drafting, rows, epoch, vocabulary)
        for _ in range(int(drafts.counts.max())):
            self._choose(drafts)
        return drafts.drafts()

    def _choose(self, drafts: DraftRound) -> Tensor:
        """Compute a pass and choose a token, int64 [n], behind each row."""
        return drafts.choose(drafts.compute())

    def settle(self, sequence: TokenSequence) -> None:
        """See `Drafter`: it has no state of its own."""

    def forget(self, sequence: TokenSequence) -> None:
        """See `Drafter`: it has no state of its own."""

    def epoch_of(self, drafting: Sequence[Drafting]) -> int:
        """The number of this set of sequences, as plans see it."""
        return self._membership.epoch_of(
            tuple(
                (
                    each.sequence.arrival_index,
                    each.sequence.preemptions,
                    each.row.slot,
                    each.row.start // each.row.retention.layout.chunk_tokens,
                )
                for each in drafting
            )
        )


def draft_row(row: Row) -> Row:
    """The decode row `row` as a draft pass computes it: its first token, over its draft.

    Raises `IntegrityError` if its cache has no draft.
    """
    draft = row.retention.draft
    if draft is None:
        raise IntegrityError("a sequence is drafted for whose cache has no draft")
    return replace(row, retention=draft, tokens=row.tokens[:1], pending=False)


def set_draft_positions(tables: PartTables, rows: Sequence[Row]) -> None:
    """The next pass over `tables` computes `rows`, which are of one layout."""
    starts, slots = np.array([row.start for row in rows]), np.array([row.slot for row in rows])
    tables.set_positions(rows[0].retention.layout, slots, starts)
