"""Attention by the Triton kernels, for pools on the GPU (and, in Triton's interpreter, in host memory)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tangram.kernels import keydiff, prefill, reference, store
from tangram.kernels.gpu import GpuDecode
from tangram.kernels.step import PrefillRows, Ranking, Workers
from tangram.kernels.transfer import upload
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.types import Int32

FUSED_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"keydiff": keydiff.score})
PROGRAMS_PER_MULTIPROCESSOR = 3  # tasks of a decode plan, see docs/performance.md


class TritonKernels:
    """`PoolKernels` of float32, bfloat16 and float16 pools for models of G = `group` query heads a KV head.

    What a step's kernels read is uploaded by `begin`, once; layers only launch.
    """

    fused_scores = FUSED_SCORES
    _decoder: GpuDecode
    _decode_address: Tensor
    _rows: PrefillRows
    _tables: Tensor

    def __init__(self, pool: Tensor, group: int) -> None:
        self._pool, self._group, self._decode_rows = pool, group, 0
        device = pool.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if pool.is_cuda else 1
        self.workers = Workers(PROGRAMS_PER_MULTIPROCESSOR * processors, tasks_each=1, tile_tokens=64)

    def load(self, plan: WorkPlan, rows: DecodeRows) -> None:
        """See `PoolKernels`. Buffers of earlier plans go back to torch's allocator, which gives them out again."""
        self._decoder = GpuDecode([plan], group=self._group, head_dim=self._pool.shape[-1], pool=self._pool)
        address = np.stack([rows.table, rows.column, rows.length_index], axis=-1).swapaxes(0, 1)
        (self._decode_address,) = upload([address.astype(np.int32)], self._pool.device)

    def begin(self, tables: Tensor, lengths: Int32, decode_rows: int, prefill: PrefillRows) -> None:
        """See `PoolKernels`."""
        self._tables, self._decode_rows, self._rows = tables, decode_rows, prefill
        arrays = [lengths.reshape(-1), prefill.address, prefill.spans, prefill.kept]
        self._lengths, self._address, self._spans, self._kept = upload(arrays, self._pool.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None,
        softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `PoolKernels`."""
        pool, tables, rows = self._pool, self._tables, self._decode_rows
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            store.append(k[:rows], v[:rows], pool, tables, self._lengths, self._decode_address, layer)
            self._decoder.attend(
                layer, q[:rows], tables, self._lengths, scaling=scaling, softcap=softcap, sinks=sinks, out=out[:rows]
            )
        longest = self._rows.longest
        if longest:
            prefill.prefill(
                q, k, v, pool, tables, self._address[layer], self._spans, layer=layer, longest=longest,
                scaling=scaling, window=window, softcap=softcap, sinks=sinks, out=out,
            )  # fmt: skip
        if self._rows.whole[layer].any():
            store.store(k, v, pool, tables, self._address[layer], self._spans, self._kept[layer], longest=longest)
        return out

    def seal(self, layer: int, row: int, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `PoolKernels`."""
        store.seal(
            ranking.scores, k, v, self._pool, self._tables, self._address[layer, row], self._kept[layer, row],
            layer=layer, sinks=ranking.sinks, window=ranking.window,
        )  # fmt: skip

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `PoolKernels`."""
        table, column, _ = self._address[layer, row].T
        return reference.first_keys(self._pool, self._tables, table, column, count)
