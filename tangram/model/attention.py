"""The one attention function that every model calls, and what it does for one step.

Transformers passes the step through as the keyword argument `tangram`, so there is no global state. Queries, keys and
values arrive as [1, heads, T, D] for the flattened batch: DECODE rows first, one token each, then TAIL and SEAL rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tangram.kernels import reference
from tangram.kernels.dispatch import PlannedDecode
from tangram.model.sealing import Addresses, ChunkSealer
from tangram.types import Int64

IMPLEMENTATION = "tangram"


class AttentionContext(Protocol):
    """Whoever computes attention for a forward pass."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q [T, Q, D], k and v [T, H, D] of one layer → [T, Q, D]."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    tangram: AttentionContext, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if attention_mask is not None:
        raise ValueError("the model built an attention mask of its own")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tangram.attend(module, q, k, v, **options)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


def keep_hidden(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook for attention modules: lets the step have the block's input, for gates that score by it."""
    context = kwargs.get("tangram")
    if isinstance(context, StepAttention):
        context.hidden = kwargs["hidden_states"][0]


@dataclass
class PrefillRow:
    """A TAIL or SEAL row: tokens [begin, end) of the step, the first at position `start`.

    `past` [L, H] is each head's length before these tokens. `sealer` is there for a SEAL row; a TAIL row stays raw.
    """

    begin: int
    end: int
    start: int
    addresses: Addresses
    past: Int64
    sealer: ChunkSealer | None = None


@dataclass
class StepAttention:
    """Attention of one step: `decode` serves the first `decode_rows` tokens, `prefill` the others."""

    pool: Tensor
    tables: Tensor
    lengths: Tensor
    windows: Sequence[int | None]
    decode_rows: int
    decode: PlannedDecode | None
    prefill: Sequence[PrefillRow]
    hidden: Tensor | None = field(default=None)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Serve one layer of the step; see `AttentionContext`."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scaling, softcap, sinks = options["scaling"], options.get("softcap"), options.get("s_aux")
        rows = self.decode_rows
        parts: list[Tensor] = []
        if self.decode is not None:
            parts.append(
                self.decode(
                    layer, q[:rows], k[:rows], v[:rows], self.pool, self.tables, self.lengths,
                    scaling=scaling, softcap=softcap, sinks=sinks,
                )
            )  # fmt: skip
        for row in self.prefill:
            own = slice(row.begin, row.end)
            at = row.addresses
            parts.append(
                reference.prefill(
                    q[own], k[own], v[own], self.pool, self.tables, at.table[layer], at.column[layer], row.past[layer],
                    scaling=scaling, window=self.windows[layer], past_tokens=row.start, softcap=softcap, sinks=sinks,
                )
            )  # fmt: skip
            self._keep(layer, row, q[own], k[own], v[own], scaling)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keep(self, layer: int, row: PrefillRow, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        if row.sealer is None:
            keys, values, at = k.transpose(0, 1), v.transpose(0, 1), row.addresses
            reference.store(keys, values, self.pool, self.tables, at.table[layer], at.column[layer], row.past[layer])
            return
        hidden = None if self.hidden is None else self.hidden[row.begin : row.end]
        row.sealer.take(layer, q, k, v, scaling=scaling, hidden=hidden, pool=self.pool, tables=self.tables)


@dataclass
class RepeatAttention:
    """KVzip's second pass over one chunk: its repetition attends to the past, to the chunk and to itself.

    Nothing of the repetition is stored; layer by layer the sealer gets what it waits for.
    """

    pool: Tensor
    tables: Tensor
    windows: Sequence[int | None]
    row: PrefillRow
    sealer: ChunkSealer

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Serve one layer of the repetition; see `AttentionContext`."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        row, at = self.row, self.row.addresses
        chunk_k, chunk_v = self.sealer.chunk_kv.pop(layer)
        out = reference.prefill(
            q, torch.cat([chunk_k, k]), torch.cat([chunk_v, v]), self.pool, self.tables,
            at.table[layer], at.column[layer], row.past[layer], scaling=options["scaling"],
            window=self.windows[layer], past_tokens=row.start, softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )  # fmt: skip
        if layer in self.sealer.pending:
            self.sealer.reconstruct(layer, q, k, self.pool, self.tables)
        return out
