"""Drafts that the model makes itself, reading only the entries that are stored first.

What a draft pass writes is overwritten: the step that follows computes the same positions from all
entries, before anything reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.cache.draft_tables import DraftTables
from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.engine.graphs import Carry
from tangram.engine.passes import Passes
from tangram.engine.sampling import choose_tokens
from tangram.engine.speculation import Drafting
from tangram.engine.token_sequence import TokenSequence
from tangram.errors import IntegrityError
from tangram.kernels.transfer import place
from tangram.types import Int64


class SelfDrafter:
    """A `Drafter` whose `passes` decode over `tables` of the serving cache."""

    def __init__(self, passes: Passes, tables: DraftTables) -> None:
        self._passes, self._tables = passes, tables
        self._members: tuple[tuple[int, int, int, int], ...] = ()
        self._epoch = 0

    def offer(self, sequence: TokenSequence, most: int) -> int:
        """See `Drafter`: all, where the sequence's cache has a draft."""
        return 0 if sequence.retention.draft is None else most

    @torch.inference_mode()
    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """See `Drafter`. A sequence with fewer drafts repeats its last pass while others go on."""
        counts = np.array([one.row.drafts for one in drafting])
        epoch, drafts = self._epoch_of(drafting), list[Tensor]()
        for number in range(int(counts.max())):
            rows = [
                self._row(one, min(number, count - 1))
                for one, count in zip(drafting, counts, strict=True)
            ]
            positions = np.array([row.start for row in rows])
            slots = np.array([row.slot for row in rows])
            self._tables.set_positions(rows[0].retention.layout, slots, positions)
            carry = partial(_carry, newest=drafts[-1] if drafts else None)
            _, logits = self._passes.logits(rows, epoch, carry, replayed=True)
            found = torch.stack(drafts, dim=1) if drafts else None
            samplers = [
                one.sampler.ahead(number, None if found is None else found[at])
                for at, one in enumerate(drafting)
            ]
            drafts.append(choose_tokens(logits, samplers))
        return flatten_drafts(torch.stack(drafts, dim=1), counts)

    def settle(self, sequence: TokenSequence) -> None:
        """See `Drafter`: it has no state of its own."""

    def forget(self, sequence: TokenSequence) -> None:
        """See `Drafter`: it has no state of its own."""

    def _row(self, one: Drafting, number: int) -> Row:
        return replace(
            one.row,
            retention=_require_draft(one.row.retention),
            start=one.row.start + number,
            tokens=one.row.tokens[:1],
            pending=number > 0,
        )

    def _epoch_of(self, drafting: Sequence[Drafting]) -> int:
        """A number that changes when the plan of a decode pass may no longer hold."""
        members = tuple(
            (
                one.sequence.arrival_index,
                one.sequence.preemptions,
                one.row.slot,
                one.row.start // one.row.retention.layout.chunk_tokens,
            )
            for one in drafting
        )
        if members != self._members:
            self._members, self._epoch = members, self._epoch + 1
        return self._epoch


def flatten_drafts(drafts: Tensor, counts: Int64) -> Tensor:
    """The first `counts` [n] of each row of `drafts` [n, most], end to end."""
    wanted = np.flatnonzero(np.arange(drafts.shape[1]) < counts[:, None])
    return drafts.flatten().index_select(0, place(wanted, drafts.device))


def _require_draft(retention: Retention) -> Retention:
    if retention.draft is None:
        raise IntegrityError("a sequence is drafted for whose cache has no draft")
    return retention.draft


def _carry(rows: Sequence[Row], ends: Int64, newest: Tensor | None) -> Carry:
    """What writes `newest` [rows], the tokens of the pass before, into those of the next one."""
    if newest is None:
        return lambda tokens: None
    target = place(ends, newest.device)
    return lambda tokens: tokens.index_copy_(0, target, newest)
