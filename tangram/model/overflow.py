"""Whether fixed budgets fit the requests: dynamic choices of some chunks against the budgets.

A profile gives each head a fixed number of entries. A chunk's own scores would give each head
another number, with as many entries shared out over all heads
(`compress/select.py:dynamic_choice`): the head's demand. Calibration compares demand and budget on
calibration texts (`tangram_lab/calibration/lost_entries.py`), this module on served requests. For a
sampled chunk the device sorts the scores once more. What is kept does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.compress.select import dynamic_choice
from tangram.config import Scope
from tangram.kernels.transfer import HostCopies
from tangram.metrics import GroupOverflow
from tangram.types import Int64

# Called with the scores [H, C] of one chunk, full-attention layer after layer; counts the demand.
ScoreReceiver = Callable[[Tensor], None]


@dataclass(eq=False)
class _Tally:
    """Counts of one retention by group: entries demanded, those over budget, heads over budget."""

    scorer: str
    figures: Int64  # [3, groups of full-attention layers]
    chunks: int = 0


class _ChunkScores:
    """The scores of one chunk as its layers arrive."""

    def __init__(self, overflow: Overflow, retention: Retention, start: int) -> None:
        self._overflow, self._retention, self._start = overflow, retention, start
        self._scores: list[Tensor] = []

    def __call__(self, scores: Tensor) -> None:
        self._scores.append(scores)
        if len(self._scores) == len(self._retention.layout.geometry.full_layers):
            self._overflow.enter(self._retention, torch.stack(self._scores), self._start)


class Overflow:
    """Samples every `every`-th chunk that is sealed with scores.

    `scopes` say which heads compete by the scores of each scorer.

    Example: two heads have a budget of 1 entry each, and a chunk's two best entries belong to the
    same head. This counts 2 entries demanded, 1 lost, and 1 of 2 heads exceeded.
    """

    def __init__(
        self, retentions: Sequence[Retention], scopes: Mapping[str, Scope], every: int
    ) -> None:
        self._scopes, self._every = scopes, every
        self._served = dict[tuple[str, float], Retention]()
        for entry in retentions:
            if entry.scorer is not None and not entry.layout.keeps_everything:
                # The first of a scorer and a ρ serves it.
                self._served.setdefault((entry.scorer, entry.kv_retention), entry)
        self._coming: deque[tuple[Retention, HostCopies]] = deque()
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        self._coming.clear()
        self._seen = 0
        self._tallies = {
            retention: _Tally(scorer, np.zeros((3, retention.layout.full_groups), np.int64))
            for (scorer, _), retention in self._served.items()
        }

    def sample(self, retention: Retention, start: int) -> ScoreReceiver | None:
        """The receiver of the scores of the chunk at position `start`; None for most chunks."""
        if retention not in self._tallies:
            return None
        self._seen += 1
        return _ChunkScores(self, retention, start) if self._seen % self._every == 0 else None

    def enter(self, retention: Retention, scores: Tensor, start: int) -> None:
        """Compute the demand of a chunk from `scores` [L, H, C] of the full-attention layers."""
        choice = dynamic_choice(
            scores,
            retention.kv_retention,
            self._scopes[self._tallies[retention].scorer],
            retention.sink_tokens,
            retention.window_tokens,
            start,
        )
        self._coming.append((retention, HostCopies(choice.sum(dim=-1))))

    def collect(self) -> None:
        """Count the demands that have arrived, without waiting for the device."""
        while self._coming and self._coming[0][1].arrived:
            retention, fetched = self._coming.popleft()
            self._count(retention, fetched.get()[0].numpy())

    def _count(self, retention: Retention, demand: Int64) -> None:
        layout, tally = retention.layout, self._tallies[retention]
        full = list(layout.geometry.full_layers)
        heads = layout.geometry.kv_heads  # other layers may have more
        lost = np.maximum(demand - layout.head_kept_tokens[full, :heads], 0)
        for place, values in enumerate((demand, lost, lost > 0)):
            np.add.at(tally.figures[place], layout.head_group[full, :heads], values)
        tally.chunks += 1

    @property
    def figures(self) -> tuple[GroupOverflow, ...]:
        """The counts since the start, group by group."""
        return tuple(
            GroupOverflow(
                retention.kv_retention, tally.scorer, group, tally.chunks, *map(int, column)
            )
            for retention, tally in self._tallies.items()
            for group, column in enumerate(tally.figures.T)
        )
