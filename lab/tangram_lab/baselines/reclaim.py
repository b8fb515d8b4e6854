"""The work of dynamic methods after a forward pass: select, wait for counts, compact, free.

With the layout's counts the result is the state that reserved budgets reach without this work. With
counts of the input it is that of the methods on which budgets were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.compress.scorers import ChunkView, Scorer
from tangram.compress.select import choose_entries, dynamic_choice, protect
from tangram.config import Scope
from tangram.engine.batcher import Batcher, DeviceTables
from tangram.engine.runner import Runner
from tangram.kernels.interface import PrefillRows
from tangram.kernels.reference import Indices, blocks
from tangram.kernels.transfer import stage, upload
from tangram.model.attention import StepAttention
from tangram.model.load import LoadedModel
from tangram.model.sealing import ChunkSealer, GroupSealer, ScoreReceiver
from tangram_lab.baselines.caches import LateCache


@dataclass
class DeferringSealer(ChunkSealer):
    """Keeps the scores [H, C] of every layer: the chunk is compressed after the step."""

    deferred: dict[int, Tensor] = field(default_factory=dict)

    def store(self, chunk: ChunkView, scores: Tensor) -> None:
        """See `ChunkSealer`."""
        self.deferred[chunk.layer] = scores


class WholeChunks(Batcher):
    """A `Batcher` whose passes store chunks whole."""

    def apart(self, rows: Sequence[Row]) -> bool:
        """See `Batcher`: chunks that are stored whole are compressed in the step itself."""
        return not rows

    def _count_stored_tokens(self, row: Row) -> int:
        return len(row.tokens)

    def _sealers_of(
        self, retention: Retention, rows: Sequence[Row], numbers: Sequence[int]
    ) -> Iterator[ChunkSealer | GroupSealer]:
        for at in numbers:
            scorer = self._scorer_of(retention)
            yield self._chunk_sealer(scorer, rows[at], at, self._receiver(rows[at]))

    def _chunk_sealer(
        self, scorer: Scorer, row: Row, number: int, wishes: ScoreReceiver | None
    ) -> ChunkSealer:
        return DeferringSealer(
            scorer, self.kernels, row, number, self.rotary, self.observer, wishes
        )


class ReclaimingRunner(Runner):
    """A `Runner` over a `LateCache`.

    With `competing` heads compete for entries in that scope, by the scores of each chunk.
    """

    batcher_type = WholeChunks

    def __init__(
        self,
        loaded: LoadedModel,
        retentions: Sequence[Retention],
        scorers: Mapping[str, Scorer],
        *,
        cache: LateCache,
        competing: Scope | None = None,
        **options: Any,
    ) -> None:
        super().__init__(loaded, retentions, scorers, cache=cache, **options)
        self._reclaimer = Reclaimer(cache, self.pool, self.passes.batcher.tables, competing)

    def _finish(self, attention: StepAttention) -> None:
        super()._finish(attention)
        sealers = [entry for entry in attention.sealers if isinstance(entry, DeferringSealer)]
        self._reclaimer.reclaim(sealers, attention.prefill)

    def _rehearse_prefill(self, tokens: int) -> None:
        """Does nothing: a rehearsed chunk would have to be reclaimed."""


@dataclass(frozen=True)
class Reclaimer:
    """Moves the chunks that a step has stored whole in `pool` into their final pages.

    Heads keep the layout's number of entries. With `competing` they compete for ρ of a chunk's
    entries in that scope.
    """

    cache: LateCache
    pool: Tensor
    tables: DeviceTables
    competing: Scope | None = None

    def reclaim(self, sealers: Sequence[DeferringSealer], rows: PrefillRows) -> None:
        """Reclaim every chunk of `sealers`, rows of `rows`, whose scores are known.

        Then `cache` holds no surplus.
        """
        ended = [sealer for sealer in sealers if sealer.deferred]
        if not ended:
            return
        kept = [self._select(sealer) for sealer in ended]
        # The host waits for the device here, once for all chunks.
        counts = torch.stack([chunk.sum(1) for chunk in kept]).cpu().numpy()
        for sealer, chunk, own in zip(ended, kept, counts, strict=True):
            self._compact(sealer, rows, chunk, int(own.sum()))
            self.cache.reclaim(sealer.row.slot, own)

    def _select(self, sealer: DeferringSealer) -> Tensor:
        """[n, C] bool: the entries that each of the n heads of the compressed layers keeps."""
        retention, layers = sealer.retention, sorted(sealer.deferred)
        scores = torch.cat([sealer.deferred[layer] for layer in layers])
        if self.competing is not None:
            every = torch.unflatten(scores, 0, (len(layers), -1))
            kept = dynamic_choice(
                every,
                retention.kv_retention,
                self.competing,
                retention.sink_tokens,
                retention.window_tokens,
                sealer.row.start,
            )
            return kept.flatten(0, 1)
        limits = stage(retention.layout.head_kept_tokens[layers].ravel(), scores.device)
        forced = protect(scores, sealer.row.start, retention.sink_tokens, retention.window_tokens)
        return choose_entries(forced, limits.to(scores.device, non_blocking=True))

    def _compact(
        self, sealer: DeferringSealer, rows: PrefillRows, kept: Tensor, count: int
    ) -> None:
        address = rows.address[sorted(sealer.deferred), sealer.number]
        table, column, past = upload([address.reshape(-1, 3)], self.pool.device)[0].T
        compact(self.pool, self.tables.flat(), table, column, past, kept, count)


def compact(
    pool: Tensor,
    tables: Tensor,
    table_off: Indices,
    column: Indices,
    first: Indices,
    kept: Tensor,
    count: int,
) -> None:
    """Move the `kept` of each head's C entries from index `first` [H] on to the front, in order.

    `kept` is bool [H, C], with `count` entries set.
    """
    offset, col, begin = (
        torch.as_tensor(x, device=pool.device).long() for x in (table_off, column, first)
    )
    head, source = torch.nonzero_static(kept, size=count).unbind(1)
    target = kept.cumsum(1)[head, source] - 1
    # Bits are moved, not numbers: torch indexes no FP8.
    entries = blocks(pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool)
    page_tokens = pool.shape[3]
    where = []
    for index in (begin[head] + source, begin[head] + target):
        block = tables[offset[head] + index // page_tokens].long() * pool.shape[1] + col[head]
        where.append((block, slice(None), index % page_tokens))
    entries[where[1]] = entries[where[0]]
