"""From a step's rows to what the attention of its forward pass needs: addresses, lengths and the decode plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.kernels.dispatch import PlannedDecode, planned_decode
from tangram.model.attention import PrefillRow, StepAttention
from tangram.model.rotary import Rotary
from tangram.model.sealing import Addresses, ChunkSealer, Retention, ScoreObserver
from tangram.plan.aot import plan_aot
from tangram.plan.form import DecodeRows
from tangram.types import Float64, Int32, Int64, Row, RowKind, Step


@dataclass
class Batcher:
    """Builds the attention of each step over one pool [N_pages, Hp, 2, P, D] and its block tables.

    `tables` int32 [max_sequences, width] and `lengths` int32 [max_sequences, groups] are the cache manager's arrays.
    The decode plan is made when the decode membership changes (`Step.epoch`) and survives growing lengths.
    """

    retentions: Sequence[Retention]
    pool: Tensor
    tables: Int32
    lengths: Int32
    rotary: Rotary | None
    workers: int
    observer: ScoreObserver | None = None
    _epoch: int | None = field(default=None, init=False)
    _decode: PlannedDecode | None = field(default=None, init=False)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens."""
        return self.retentions[0].layout.geometry.windows

    def attention(self, step: Step) -> StepAttention:
        """The attention of `step`, whose pages the scheduler has taken."""
        decode = step.rows[: step.decode_rows]
        if decode and step.epoch != self._epoch:
            rows = self._decode_rows(decode)
            self._decode = planned_decode(plan_aot(rows, self.workers), rows, self.pool)
            self._epoch = step.epoch
        begins = np.cumsum([0, *(len(row.tokens) for row in step.rows)]).tolist()
        prefill = [
            self._prefill_row(row, begin) for row, begin in zip(step.rows, begins, strict=False)
            if row.kind is not RowKind.DECODE
        ]  # fmt: skip
        return StepAttention(
            pool=self.pool, tables=self.flat_tables, lengths=self._on_device(self.lengths), windows=self.windows,
            decode_rows=len(decode), decode=self._decode if decode else None, prefill=prefill,
        )  # fmt: skip

    @property
    def flat_tables(self) -> Tensor:
        """int32: the block tables of all rows, end to end."""
        return self._on_device(self.tables)

    def _on_device(self, array: Int32) -> Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self.pool.device)

    def _addresses(self, row: Row) -> Addresses:
        return Addresses.of(self.retentions[row.layout].layout, row.slot, self.tables.shape[1])

    def _decode_rows(self, rows: Sequence[Row]) -> DecodeRows:
        layouts = [self.retentions[row.layout].layout for row in rows]
        addresses = [self._addresses(row) for row in rows]
        first = [row.slot * self.lengths.shape[1] for row in rows]
        return DecodeRows(
            table=np.stack([at.table for at in addresses]),
            column=np.stack([at.column for at in addresses]),
            length_index=np.stack([begin + layout.head_group for begin, layout in zip(first, layouts, strict=True)]),
            budget=np.stack([_expected(layout, row.start) for layout, row in zip(layouts, rows, strict=True)]),
            windows=self.windows,
            page_tokens=layouts[0].page_tokens,
        )

    def _prefill_row(self, row: Row, begin: int) -> PrefillRow:
        retention, addresses = self.retentions[row.layout], self._addresses(row)
        layout = retention.layout
        sealed_chunks, raw_tokens = divmod(row.start, layout.chunk_tokens)
        past: Int64 = layout.lengths(sealed_chunks, raw_tokens)[layout.head_group].astype(np.int64)
        sealer = ChunkSealer(retention, addresses, row.start, past, self.rotary, self.observer)
        return PrefillRow(
            begin, begin + len(row.tokens), row.start, addresses, past, sealer if row.kind is RowKind.SEAL else None
        )


def _expected(layout: Layout, position: int) -> Float64:
    """[L, H]: entries of each head while a row at `position` decodes: sealed chunks and half a chunk of raw tail."""
    lengths = layout.lengths(position // layout.chunk_tokens, layout.chunk_tokens // 2)
    return np.asarray(lengths[layout.head_group], np.float64)
