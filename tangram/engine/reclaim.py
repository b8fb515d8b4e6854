"""What dynamic methods do after a forward pass: select, wait for the counts, compact, give pages back.

Only measurements run it (`EngineConfig.reclamation`). By the layout's counts it leaves the state that reserved budgets
reach without it; by the input's own, what the methods keep that budgets were measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.cache.dynamic import LateCache
from tangram.compress.select import Scope, chosen, dynamic_choice, protect
from tangram.engine.batch import DeviceTables
from tangram.kernels.reference import compact
from tangram.kernels.step import PrefillRows
from tangram.kernels.transfer import staged, upload
from tangram.model.sealing import ChunkSealer


@dataclass(frozen=True)
class Reclaimer:
    """Brings the chunks that a step has stored whole in `pool` into their final pages.

    Heads keep what their layout says, or with `competing` share out ρ of a chunk's entries among them, in that scope.
    """

    cache: LateCache
    pool: Tensor
    tables: DeviceTables
    competing: Scope | None = None

    def reclaim(self, sealers: Sequence[ChunkSealer], rows: PrefillRows) -> None:
        """Every chunk of `sealers`, rows of `rows`, whose scores are known; `cache` then holds no surplus."""
        ended = [sealer for sealer in sealers if sealer.deferred]
        if not ended:
            return
        kept = [self._select(sealer) for sealer in ended]
        # Here the host waits for the device, once for all chunks.
        counts = torch.stack([chunk.sum(1) for chunk in kept]).cpu().numpy()
        for sealer, chunk, own in zip(ended, kept, counts, strict=True):
            self._compact(sealer, rows, chunk, int(own.sum()))
            self.cache.reclaim(sealer.row.slot, own)

    def _select(self, sealer: ChunkSealer) -> Tensor:
        """[n, C] bool: what each of the n heads of the compressed layers keeps."""
        retention, layers = sealer.retention, sorted(sealer.deferred)
        scores = torch.cat([sealer.deferred[layer] for layer in layers])
        if self.competing is not None:
            every = torch.unflatten(scores, 0, (len(layers), -1))
            kept = dynamic_choice(
                every, retention.kv_retention, self.competing, retention.sink_tokens, retention.window_tokens,
                sealer.row.start,
            )  # fmt: skip
            return kept.flatten(0, 1)
        limits = staged(retention.layout.head_kept_tokens[layers].ravel(), scores.device)
        forced = protect(scores, sealer.row.start, retention.sink_tokens, retention.window_tokens)
        return chosen(forced, limits.to(scores.device, non_blocking=True))

    def _compact(self, sealer: ChunkSealer, rows: PrefillRows, kept: Tensor, count: int) -> None:
        address = rows.address[sorted(sealer.deferred), sealer.number]
        table, column, past = upload([address.reshape(-1, 3)], self.pool.device)[0].T
        compact(self.pool, self.tables.flat(), table, column, past, kept, count)
