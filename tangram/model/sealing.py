"""Sealing: computes a chunk's scores, selects entries and stores them in their final pages.

By the purity law the result depends on the chunk alone, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.compress.scorers import ChunkView, Reconstruction, Scorer
from tangram.compress.select import order, protect
from tangram.errors import IntegrityError
from tangram.kernels.interface import Launch, PoolKernels, Ranking
from tangram.model.overflow import Overflow, ScoreReceiver
from tangram.model.rotary import Rotary
from tangram.types import Int32

# Called with (the chunk in one layer, its scores [H, C]); calibration and inspection use it.
ScoreObserver = Callable[[ChunkView, Tensor], None]


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


def score_by_kernel(
    kernel: Callable[..., Tensor], scorer: Scorer, chunks: ChunkView, count: int
) -> Tensor:
    """`GroupScores` of a kernel that computes what `scorer` does, for several chunks."""
    return kernel(*scorer.kernel_inputs(chunks, count))


def find_group_scores(scorer: Scorer, kernels: PoolKernels) -> GroupScores | None:
    """The fastest way to score several chunks together; None if each must be by itself."""
    kernel = None if scorer.kernel is None else kernels.fused_scores.get(scorer.kernel)
    if kernel is not None:
        return partial(score_by_kernel, kernel, scorer)
    return partial(score_by_token, scorer) if scorer.by_token else None


@dataclass(frozen=True, eq=False)
class Seal:
    """Chunks of one retention that a pass seals: its prefill rows from number `first` on.

    `rows` lie end to end. Those of several are sealed together, as one is.
    """

    first: int
    rows: tuple[Row, ...]

    @property
    def retention(self) -> Retention:
        """How the sequences of its rows keep KV entries."""
        return self.rows[0].retention

    @property
    def numbers(self) -> slice:
        """The numbers of its rows among the prefill rows of the pass."""
        return slice(self.first, self.first + len(self.rows))


@dataclass(frozen=True, eq=False)
class GroupSealer:
    """Seals the chunks of `seal` together. `receivers` get the scores of some chunks."""

    seal: Seal
    scores: GroupScores
    receivers: Mapping[int, ScoreReceiver] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """See `Seal.numbers`."""
        return self.seal.numbers

    def take(self, launch: Launch, chunks: ChunkView) -> None:
        """See `ChunkSealer`; the chunks of all rows lie end to end, as if they were one."""
        retention = self.seal.retention
        if retention.layout.geometry.windows[chunks.layer] is not None:
            return
        scores = self.scores(chunks, len(self.seal.rows))
        for chunk, receive in self.receivers.items():
            receive(scores[chunk])
        _store(launch, retention, self.rows, chunks, scores)


@dataclass(frozen=True, eq=False)
class ChunkSealer:
    """Seals the chunk of `row`, layer by layer, as its activations arrive.

    `number` is the row's number among the prefill rows of its pass. `scores` are those of a scorer
    that takes several chunks, too. With a scorer that needs a reconstruction, the chunk waits in
    `pending` until the second pass brings the queries of its repetition. `chunk_kv` keeps its k and
    v [C, H, D] of every layer for that pass. `receiver` gets the scores, too.
    """

    scorer: Scorer
    row: Row
    number: int
    scores: GroupScores | None = None
    rotaries: Mapping[int, Rotary] = field(default_factory=dict)
    observer: ScoreObserver | None = None
    receiver: ScoreReceiver | None = None
    pending: dict[int, ChunkView] = field(default_factory=dict)
    chunk_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """Its one row."""
        return slice(self.number, self.number + 1)

    @property
    def waits(self) -> bool:
        """True when scores need a second pass over the chunk."""
        return "reconstruction" in self.scorer.needs

    def take(self, launch: Launch, chunk: ChunkView) -> None:
        """Score, select and store a layer of the chunk by `launch`, or wait."""
        layer = chunk.layer
        if self.waits:
            self.chunk_kv[layer] = chunk.keys.transpose(0, 1), chunk.values.transpose(0, 1)
        if self.row.retention.layout.geometry.windows[layer] is not None:
            return
        sinks = self._sink_keys(launch, layer, chunk.keys.dtype) if self.waits else None
        rotary = self.rotaries.get(layer)
        chunk = replace(chunk, start=self.row.start, rotary=rotary, sink_keys=sinks)
        if self.waits:
            self.pending[layer] = chunk
        else:
            self._select(launch, chunk)

    def reconstruct(self, launch: Launch, layer: int, q: Tensor, k: Tensor) -> None:
        """The repetition's q [T, Q, D] and k [T, H, D] in one layer.

        Scores, selects and stores the waiting chunk.
        """
        repeat = Reconstruction(queries=q.transpose(0, 1), keys=k.transpose(0, 1))
        self._select(launch, replace(self.pending.pop(layer), reconstruction=repeat))

    def _select(self, launch: Launch, chunk: ChunkView) -> None:
        together = self.scores
        scores = self.scorer.score(chunk) if together is None else together(chunk, 1)[0]
        if self.observer is not None:
            self.observer(chunk, scores)
        if self.receiver is not None:
            self.receiver(scores)
        if self.row.retention.orders:  # otherwise it is stored already
            _store(launch, self.row.retention, self.rows, chunk, scores[None])

    def _sink_keys(self, launch: Launch, layer: int, dtype: torch.dtype) -> Tensor | None:
        """[H, s, D]: the keys of the sequence's first s tokens, which every head keeps first."""
        if self.row.start == 0:
            return None
        return launch.first_keys(layer, self.number, self.row.retention.sink_tokens).to(dtype)


def _store(
    launch: Launch, retention: Retention, rows: slice, chunks: ChunkView, scores: Tensor
) -> None:
    """Store the entries of one layer that `scores` [N, H, C] select in their final pages."""
    ranking = ChunkRanking(scores, retention.sink_tokens, retention.window_tokens)
    keys, values = (x.transpose(0, 1) for x in (chunks.keys, chunks.values))
    launch.seal(chunks.layer, rows, ranking, keys, values)


@dataclass(frozen=True, eq=False)
class Sealing:
    """What scores the chunks of one model: `scorers` by name, each those of its own retentions.

    `kernels` may compute them faster. `observer` sees every chunk with its scores; the receivers of
    `overflow` see the scores of some.
    """

    scorers: Mapping[str, Scorer]
    kernels: PoolKernels
    rotaries: Mapping[int, Rotary] = field(default_factory=dict)
    observer: ScoreObserver | None = None
    overflow: Overflow | None = None

    def sealers(self, seals: Sequence[Seal]) -> list[ChunkSealer | GroupSealer]:
        """The sealers of one pass; the chunks of a seal share one where the kernels can."""
        return [sealer for seal in seals for sealer in self._sealers(seal)]

    def replayable(self, seals: Sequence[Seal]) -> bool:
        """Whether a CUDA graph can hold all: what scores these chunks takes several at a time."""
        return all(
            self.observer is None
            and find_group_scores(self._scorer(seal.retention), self.kernels) is not None
            for seal in seals
        )

    def _sealers(self, seal: Seal) -> Iterator[ChunkSealer | GroupSealer]:
        retention = seal.retention
        receivers = {at: self._receiver(row) for at, row in enumerate(seal.rows)}
        together = self._scores_together(retention)
        if together is not None:
            asked = {at: receive for at, receive in receivers.items() if receive is not None}
            yield GroupSealer(seal, together, asked)
            return
        scorer = self._scorer(retention)
        scores = find_group_scores(scorer, self.kernels)
        rotaries = self.rotaries if "rotary" in scorer.needs else {}
        for at, row in enumerate(seal.rows):
            known = scores, rotaries, self.observer, receivers[at]
            yield ChunkSealer(scorer, row, seal.first + at, *known)

    def _scores_together(self, retention: Retention) -> GroupScores | None:
        """What scores several chunks; None where each is scored by itself."""
        if self.observer is not None or not retention.orders:
            return None
        return find_group_scores(self._scorer(retention), self.kernels)

    def _scorer(self, retention: Retention) -> Scorer:
        scorer = None if retention.scorer is None else self.scorers.get(retention.scorer)
        if scorer is None:
            raise IntegrityError(f"a chunk must be scored by {retention.scorer}, which is not here")
        return scorer

    def _receiver(self, row: Row) -> ScoreReceiver | None:
        overflow = self.overflow
        return None if overflow is None else overflow.sample(row.retention, row.start)
