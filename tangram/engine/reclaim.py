"""What dynamic reclamation does after a forward pass: select, wait for the counts, compact, give pages back.

Only measurements run it (`EngineConfig.reclamation`): it leaves the state that reserved budgets reach without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.cache.dynamic import DynamicCache
from tangram.compress.select import chosen, protect
from tangram.engine.batch import DeviceTables
from tangram.kernels.reference import compact
from tangram.kernels.step import PrefillRows
from tangram.kernels.transfer import staged
from tangram.model.sealing import ChunkSealer
from tangram.types import Int64


@dataclass(frozen=True)
class Reclaimer:
    """Brings the chunks that a step has stored whole in `pool` into their final pages."""

    cache: DynamicCache
    pool: Tensor
    tables: DeviceTables

    def reclaim(self, sealers: Sequence[ChunkSealer], rows: PrefillRows) -> None:
        """Every chunk of `sealers`, rows of `rows`, whose scores are known; `cache` then holds no surplus."""
        for sealer in sealers:
            if sealer.deferred:
                kept = self._select(sealer)
                self.cache.reclaim(sealer.row.slot, self._compact(sealer, rows, kept))

    def _select(self, sealer: ChunkSealer) -> Tensor:
        """[n, C] bool: what each of the n heads of the compressed layers keeps."""
        retention, layers = sealer.retention, sorted(sealer.deferred)
        scores = torch.cat([sealer.deferred[layer] for layer in layers])
        limits = staged(retention.layout.head_kept_tokens[layers].ravel(), scores.device)
        forced = protect(scores, sealer.row.start, retention.sink_tokens, retention.window_tokens)
        return chosen(forced, limits.to(scores.device, non_blocking=True))

    def _compact(self, sealer: ChunkSealer, rows: PrefillRows, kept: Tensor) -> Int64:
        """[L, H]: how many entries each head has kept, all of them where it has no scores."""
        layers = sorted(sealer.deferred)
        counts = np.full(rows.kept.shape[::2], len(sealer.row.tokens), np.int64)
        # Here the host waits for the device.
        counts[layers] = kept.sum(1).cpu().numpy().reshape(len(layers), -1)
        table, column, past = rows.address[layers, sealer.number].reshape(-1, 3).T
        compact(self.pool, self.tables.flat(), table, column, past, kept)
        return counts
