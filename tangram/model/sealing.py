"""Sealing: one whole chunk in, its final pages out (the purity law: from the chunk alone, whatever the batch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.compress.scorers import ChunkView, Reconstruction, Scorer
from tangram.compress.select import keep, protect
from tangram.errors import IntegrityError
from tangram.kernels import reference
from tangram.model.rotary import Rotary
from tangram.types import Int64

# (position of the chunk, layer, scores [H, C]) as they come: calibration and inspection look on here.
ScoreObserver = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class Retention:
    """One way to keep KV entries: ρ, where they lie, and who decides which. `scorer` None keeps all without scoring."""

    kv_retention: float
    layout: Layout
    fingerprint: str
    scorer: Scorer | None = None
    sink_tokens: int = 0
    window_tokens: int = 0


@dataclass(frozen=True)
class Addresses:
    """Where one sequence's heads lie, [L, H] each: offsets into the flat block tables, and columns."""

    table: Int64
    column: Int64

    @classmethod
    def of(cls, layout: Layout, slot: int, width: int) -> Addresses:
        """The addresses of the sequence in row `slot` of block tables `width` entries wide."""
        return cls(slot * width + layout.group_offset[layout.head_group], layout.head_column.astype(np.int64))


@dataclass
class ChunkSealer:
    """Seals one chunk of one sequence, layer by layer, as its activations come by.

    `first_index` [L, H] is each head's length before this chunk. With a scorer that needs a reconstruction the chunk
    waits in `pending` until the second pass brings the queries of its repetition; `chunk_kv` keeps its k and v
    [C, H, D] of every layer for that pass.
    """

    retention: Retention
    addresses: Addresses
    start: int
    first_index: Int64
    rotary: Rotary | None
    observer: ScoreObserver | None = None
    pending: dict[int, ChunkView] = field(default_factory=dict)
    chunk_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """True when scores need a second pass over the chunk."""
        scorer = self.retention.scorer
        return scorer is not None and "reconstruction" in scorer.needs

    def take(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, hidden: Tensor | None,
        pool: Tensor, tables: Tensor,
    ) -> None:  # fmt: skip
        """The chunk's q [C, Q, D], k and v [C, H, D] in one layer: score, select and store, or wait."""
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if self.waits:
            self.chunk_kv[layer] = (k, v)
        if self.retention.scorer is None or self.retention.layout.geometry.windows[layer] is not None:
            self._store(layer, keys, values, pool, tables)
            return
        chunk = ChunkView(
            queries=q.transpose(0, 1), keys=keys, values=values, start=self.start, layer=layer, scaling=scaling,
            rotary=self.rotary, hidden=hidden, sink_keys=self._sink_keys(layer, pool, tables) if self.waits else None,
        )  # fmt: skip
        if self.waits:
            self.pending[layer] = chunk
        else:
            self._select(chunk, pool, tables)

    def reconstruct(self, layer: int, q: Tensor, k: Tensor, pool: Tensor, tables: Tensor) -> None:
        """The repetition's q [T, Q, D] and k [T, H, D] in one layer: score, select and store the waiting chunk."""
        repeat = Reconstruction(queries=q.transpose(0, 1), keys=k.transpose(0, 1))
        self._select(replace(self.pending.pop(layer), reconstruction=repeat), pool, tables)

    def _select(self, chunk: ChunkView, pool: Tensor, tables: Tensor) -> None:
        retention, layer = self.retention, chunk.layer
        if retention.scorer is None:
            raise IntegrityError("a chunk without a scorer waits for its scores")
        scores = retention.scorer.score(chunk)
        if self.observer is not None:
            self.observer(self.start, layer, scores)
        if retention.layout.keeps_everything:
            self._store(layer, chunk.keys, chunk.values, pool, tables)
            return
        protected = protect(scores, self.start, retention.sink_tokens, retention.window_tokens)
        kept = keep(protected, retention.layout.head_kept_tokens[layer].tolist())
        keys = [head[positions] for head, positions in zip(chunk.keys, kept, strict=True)]
        values = [head[positions] for head, positions in zip(chunk.values, kept, strict=True)]
        self._store(layer, keys, values, pool, tables)

    def _store(
        self, layer: int, k: Tensor | list[Tensor], v: Tensor | list[Tensor], pool: Tensor, tables: Tensor
    ) -> None:
        at = self.addresses
        reference.store(k, v, pool, tables, at.table[layer], at.column[layer], self.first_index[layer])

    def _sink_keys(self, layer: int, pool: Tensor, tables: Tensor) -> Tensor | None:
        """[H, s, D]: the keys of the sequence's first s tokens, which every head keeps first."""
        if self.start == 0 or self.retention.sink_tokens == 0:
            return None
        at, sinks = self.addresses, self.retention.sink_tokens
        heads = [
            reference.gather(pool, tables, int(table), int(column), 0, sinks)[0]
            for table, column in zip(at.table[layer], at.column[layer], strict=True)
        ]
        return torch.stack(heads)
