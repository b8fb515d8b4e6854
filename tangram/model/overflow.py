"""Whether fixed budgets still fit what is being served: some chunks' wishes beside what their heads
have room for.

A profile gives each head a fixed number of entries. What a chunk's own scores would have given it,
with as many entries shared out over all heads (`compress/select.py:dynamic_choice`), is its wish.
Calibration compares the two on pilot texts (`calibrate/overflow.py`), this on what is being served.
It costs the device one more sort of the scores of a chunk that is looked at. What is kept does not
change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.compress.profile import Scope
from tangram.compress.select import dynamic_choice
from tangram.kernels.transfer import HostCopies
from tangram.metrics import GroupOverflow
from tangram.model.sealing import Wishes
from tangram.types import Int64


@dataclass(eq=False)
class _Tally:
    """Of one retention, by group: entries wished, entries of these without room, and heads that
    lack some.
    """

    figures: Int64  # [3, groups of full-attention layers]
    chunks: int = 0


class _ChunkScores:
    """The scores of one chunk as they come."""

    def __init__(self, overflow: Overflow, retention: Retention, start: int) -> None:
        self._overflow, self._retention, self._start = overflow, retention, start
        self._scores: list[Tensor] = []

    def __call__(self, scores: Tensor) -> None:
        self._scores.append(scores)
        if len(self._scores) == len(self._retention.layout.geometry.full_layers):
            self._overflow.enter(self._retention, torch.stack(self._scores), self._start)


class Overflow:
    """Looks at every `every`-th chunk that is sealed with scores. `scope` says which heads compete.

    Example: a budget of 1 entry for each of two heads; a chunk whose two best entries are the same
    head's counts 2 wished, 1 lost, 1 of 2 heads exceeded.
    """

    def __init__(self, retentions: Sequence[Retention], scope: Scope, every: int) -> None:
        self._retentions, self._scope, self._every = retentions, scope, every
        self._coming: deque[tuple[Retention, HostCopies]] = deque()
        self.clear()

    def clear(self) -> None:
        """Forget what was seen so far."""
        self._coming.clear()
        self._seen, served = 0, dict[float, Retention]()
        for retention in self._retentions:
            served.setdefault(retention.kv_retention, retention)  # the first of a ρ serves it
        self._tallies = {
            retention: _Tally(np.zeros((3, retention.layout.full_groups), np.int64))
            for retention in served.values()
            if not retention.layout.keeps_everything
        }

    def sample(self, retention: Retention, start: int) -> Wishes | None:
        """Who wants the scores of the chunk at position `start`; None for most chunks."""
        if retention not in self._tallies:
            return None
        self._seen += 1
        return _ChunkScores(self, retention, start) if self._seen % self._every == 0 else None

    def enter(self, retention: Retention, scores: Tensor, start: int) -> None:
        """Compute the wishes of a chunk from its `scores` [L, H, C], of the
        full-attention layers.
        """
        choice = dynamic_choice(
            scores,
            retention.kv_retention,
            self._scope,
            retention.sink_tokens,
            retention.window_tokens,
            start,
        )
        self._coming.append((retention, HostCopies(choice.sum(dim=-1))))

    def collect(self) -> None:
        """Enter the wishes that have arrived; the device is not waited for."""
        while self._coming and self._coming[0][1].arrived:
            retention, fetched = self._coming.popleft()
            self._count(retention, fetched.get()[0].numpy())

    def _count(self, retention: Retention, wishes: Int64) -> None:
        layout, tally = retention.layout, self._tallies[retention]
        full = list(layout.geometry.full_layers)
        lost = np.maximum(wishes - layout.head_kept_tokens[full], 0)
        for place, values in enumerate((wishes, lost, lost > 0)):
            np.add.at(tally.figures[place], layout.head_group[full], values)
        tally.chunks += 1

    @property
    def figures(self) -> tuple[GroupOverflow, ...]:
        """Since the start, group by group."""
        return tuple(
            GroupOverflow(retention.kv_retention, group, tally.chunks, *map(int, column))
            for retention, tally in self._tallies.items()
            for group, column in enumerate(tally.figures.T)
        )
