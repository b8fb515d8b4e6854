"""Whether fixed budgets still fit what is being served: some chunks' wishes beside what their heads have room for.

A profile gives each head a fixed number of entries. What a chunk's own scores would have given it, with as many
entries shared out over all heads (`compress/select.py:dynamic_choice`), is its wish. Calibration compares the two on
pilot texts (`calibrate/overflow.py`), this on what is being served. It costs the device one more sort of the scores of
a chunk that is looked at. What is kept does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.compress.select import Scope, dynamic_choice
from tangram.kernels.transfer import Fetched
from tangram.metrics import GroupOverflow
from tangram.model.sealing import Retention, Wishes
from tangram.types import Int64


@dataclass(eq=False)
class _Tally:
    """Of one retention, by group: entries wished, entries of these without room, and heads that lack some."""

    retention: Retention
    figures: Int64  # [3, groups of full-attention layers]
    chunks: int = 0


class _ChunkScores:
    """The scores of one chunk as they come."""

    def __init__(self, overflow: Overflow, number: int, start: int) -> None:
        self._overflow, self._number, self._start = overflow, number, start
        self._scores: list[Tensor] = []

    def __call__(self, scores: Tensor) -> None:
        self._scores.append(scores)
        if len(self._scores) == len(self._overflow.retentions[self._number].layout.geometry.full_layers):
            self._overflow.enter(self._number, torch.stack(self._scores), self._start)


class Overflow:
    """Looks at every `every`-th chunk that is sealed with scores. `scope` says which heads compete.

    Example: a budget of 1 entry for each of two heads; a chunk whose two best entries are the same head's counts 2
    wished, 1 lost, 1 of 2 heads exceeded.
    """

    def __init__(self, retentions: Sequence[Retention], scope: Scope, every: int) -> None:
        self.retentions, self._scope, self._every = retentions, scope, every
        self._coming: deque[tuple[int, Fetched]] = deque()
        self.clear()

    def clear(self) -> None:
        """Forget what was seen so far."""
        self._coming.clear()
        self._seen, served = 0, [entry.kv_retention for entry in self.retentions]
        self._tallies = {
            number: _Tally(entry, np.zeros((3, entry.layout.full_groups), np.int64))
            for number, entry in enumerate(self.retentions)
            if not entry.layout.keeps_everything and served.index(entry.kv_retention) == number  # the first serves it
        }

    def sample(self, number: int, start: int) -> Wishes | None:
        """Who wants the scores of the chunk at position `start`, of retention `number`; None for most chunks."""
        if number not in self._tallies:
            return None
        self._seen += 1
        return _ChunkScores(self, number, start) if self._seen % self._every == 0 else None

    def enter(self, number: int, scores: Tensor, start: int) -> None:
        """Compute the wishes of a chunk from its `scores` [L, H, C], of the full-attention layers."""
        entry = self.retentions[number]
        choice = dynamic_choice(
            scores, entry.kv_retention, self._scope, entry.sink_tokens, entry.window_tokens, start
        )  # fmt: skip
        self._coming.append((number, Fetched(choice.sum(dim=-1))))

    def collect(self) -> None:
        """Enter the wishes that have arrived; the device is not waited for."""
        while self._coming and self._coming[0][1].arrived:
            number, fetched = self._coming.popleft()
            self._count(self._tallies[number], fetched.get()[0].numpy())

    def _count(self, tally: _Tally, wishes: Int64) -> None:
        layout = tally.retention.layout
        full = list(layout.geometry.full_layers)
        lost = np.maximum(wishes - layout.head_kept_tokens[full], 0)
        for place, values in enumerate((wishes, lost, lost > 0)):
            np.add.at(tally.figures[place], layout.head_group[full], values)
        tally.chunks += 1

    @property
    def figures(self) -> tuple[GroupOverflow, ...]:
        """Since the start, group by group."""
        return tuple(
            GroupOverflow(tally.retention.kv_retention, group, tally.chunks, *map(int, column))
            for tally in self._tallies.values()
            for group, column in enumerate(tally.figures.T)
        )
