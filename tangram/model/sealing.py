"""Sealing: computes a chunk's scores, selects entries and stores them in their final pages.

By the purity law the result depends on the chunk alone, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.compress.scorers import ChunkView, Reconstruction, Scorer
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import NORM_EPSILON
from tangram.compress.select import order, protect
from tangram.kernels.interface import GateKernel, PoolKernels, Ranking
from tangram.model.rotary import Rotary
from tangram.types import Int32

# Called with (the chunk in one layer, its scores [H, C]); calibration and inspection use it.
ScoreObserver = Callable[[ChunkView, Tensor], None]
# Called with the scores [H, C] of one chunk, full-attention layer after layer; counts the demand.
ScoreReceiver = Callable[[Tensor], None]


class ChunkRanking(Ranking):
    """The order of `compress/select.py`."""

    def places(self, chunk: int, start: int, first: Int32, kept: Int32) -> list[Tensor]:
        """See `Ranking`."""
        scores = protect(self.scores[chunk], start, self.sinks, self.window)
        return order(scores, first, kept)


# From the tokens of N chunks, as if they were one, and N: the chunks' scores [N, H, C].
GroupScores = Callable[[ChunkView, int], Tensor]


def score_by_token(scorer: Scorer, chunks: ChunkView, count: int) -> Tensor:
    """`GroupScores` of a scorer that scores `by_token`: [N, H, C] of `count` (N) chunks."""
    return torch.unflatten(scorer.score(chunks), 1, (count, -1)).transpose(0, 1).contiguous()


def score_by_kernel(kernel: Callable[[Tensor], Tensor], chunks: ChunkView, count: int) -> Tensor:
    """`GroupScores` of a kernel that takes the keys [N, H, C, D] of several chunks."""
    return kernel(torch.unflatten(chunks.keys, 1, (count, -1)).transpose(0, 1))


def score_by_gate(kernel: GateKernel, scorer: FastKVzip, chunks: ChunkView, count: int) -> Tensor:
    """`GroupScores` of a kernel that computes the gate of a layer: [N, H, C]."""
    weights, hidden = scorer.read(chunks)
    return kernel(weights, hidden, count, NORM_EPSILON)


def find_group_scores(scorer: Scorer, kernels: PoolKernels) -> GroupScores | None:
    """The fastest way to score several chunks together; None if each must be by itself."""
    if scorer.name in kernels.fused_scores:
        return partial(score_by_kernel, kernels.fused_scores[scorer.name])
    if isinstance(scorer, FastKVzip) and kernels.fused_gate is not None:
        return partial(score_by_gate, kernels.fused_gate, scorer)
    return partial(score_by_token, scorer) if scorer.by_token else None


@dataclass(frozen=True, eq=False)
class GroupSealer:
    """Seals several chunks of one retention together.

    The chunks are the prefill `rows`, which lie end to end. `receivers` get the scores of some
    chunks.
    """

    retention: Retention
    kernels: PoolKernels
    scores: GroupScores
    rows: slice
    replayable: ClassVar[bool] = True
    receivers: Mapping[int, ScoreReceiver] = field(default_factory=dict)

    def take(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, hidden: Tensor | None
    ) -> None:
        """See `ChunkSealer`; q, k and v are those of all rows, [N · C, …, D]."""
        retention = self.retention
        if retention.layout.geometry.windows[layer] is not None:
            return
        chunks = ChunkView(
            queries=q.transpose(0, 1),
            keys=k.transpose(0, 1),
            values=v.transpose(0, 1),
            start=0,
            layer=layer,
            scaling=scaling,
            hidden=hidden,
        )
        scores = self.scores(chunks, self.rows.stop - self.rows.start)
        for chunk, receive in self.receivers.items():
            receive(scores[chunk])
        ranking = ChunkRanking(scores, retention.sink_tokens, retention.window_tokens)
        self.kernels.seal(layer, self.rows, ranking, k, v)


@dataclass
class ChunkSealer:
    """Seals the chunk of `row`, layer by layer, as its activations arrive.

    `number` is the row's number among the prefill rows of the step that `kernels` have begun. With
    a scorer that needs a reconstruction, the chunk waits in `pending` until the second pass brings
    the queries of its repetition. `chunk_kv` keeps its k and v [C, H, D] of every layer for that
    pass. `receiver` gets the scores, too.
    """

    scorer: Scorer
    kernels: PoolKernels
    row: Row
    number: int
    rotary: Rotary | None
    observer: ScoreObserver | None = None
    receiver: ScoreReceiver | None = None
    pending: dict[int, ChunkView] = field(default_factory=dict)
    chunk_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def retention(self) -> Retention:
        """How the row's sequence keeps KV entries."""
        return self.row.retention

    @property
    def rows(self) -> slice:
        """Its one row."""
        return slice(self.number, self.number + 1)

    @property
    def replayable(self) -> bool:
        """Whether a CUDA graph can hold its work."""
        return self.scorer.replayable and self.observer is None and self.receiver is None

    @property
    def waits(self) -> bool:
        """True when scores need a second pass over the chunk."""
        return "reconstruction" in self.scorer.needs

    def take(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, hidden: Tensor | None
    ) -> None:
        """Score, select and store a layer of the chunk: q [C, Q, D], k, v [C, H, D]; or wait."""
        if self.waits:
            self.chunk_kv[layer] = (k, v)
        if self.retention.layout.geometry.windows[layer] is not None:
            return
        chunk = ChunkView(
            queries=q.transpose(0, 1),
            keys=k.transpose(0, 1),
            values=v.transpose(0, 1),
            start=self.row.start,
            layer=layer,
            scaling=scaling,
            rotary=self.rotary,
            hidden=hidden,
            sink_keys=self._sink_keys(layer, k.dtype) if self.waits else None,
        )
        if self.waits:
            self.pending[layer] = chunk
        else:
            self._select(chunk)

    def reconstruct(self, layer: int, q: Tensor, k: Tensor) -> None:
        """The repetition's q [T, Q, D] and k [T, H, D] in one layer.

        Scores, selects and stores the waiting chunk.
        """
        repeat = Reconstruction(queries=q.transpose(0, 1), keys=k.transpose(0, 1))
        self._select(replace(self.pending.pop(layer), reconstruction=repeat))

    def _select(self, chunk: ChunkView) -> None:
        together = find_group_scores(self.scorer, self.kernels)
        scores = self.scorer.score(chunk) if together is None else together(chunk, 1)[0]
        if self.observer is not None:
            self.observer(chunk, scores)
        if self.receiver is not None:
            self.receiver(scores)
        self.store(chunk, scores)

    def store(self, chunk: ChunkView, scores: Tensor) -> None:
        """Store the entries of one layer that `scores` [H, C] select in their final pages."""
        retention = self.retention
        if not retention.orders:
            return  # it is stored already
        ranking = ChunkRanking(scores[None], retention.sink_tokens, retention.window_tokens)
        self.kernels.seal(
            chunk.layer,
            self.rows,
            ranking,
            chunk.keys.transpose(0, 1),
            chunk.values.transpose(0, 1),
        )

    def _sink_keys(self, layer: int, dtype: torch.dtype) -> Tensor | None:
        """[H, s, D]: the keys of the sequence's first s tokens, which every head keeps first."""
        if self.row.start == 0:
            return None
        return self.kernels.first_keys(layer, self.number, self.retention.sink_tokens).to(dtype)
