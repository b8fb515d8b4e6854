"""FlashInfer's paged decode over Tangram's pool, in place, where that library is installed.

A page may hold heads of one layer that share table and length. Then each run of Hp heads is a
sequence with Hp KV heads in FlashInfer's HND layout. For Hp = H that is one ordinary sequence a
request. In pages of heads of any length, each (row, head) is a sequence with one KV head over
*virtual blocks*, page · Hp + column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.errors import ConfigError
from tangram.plan.form import DecodeRows
from tangram.types import Int32

WORKSPACE_BYTES = 2 << 30  # 1024 rows of 64 heads need a little over 512 MiB


def is_installed() -> bool:
    """Whether FlashInfer can be imported."""
    return find_spec("flashinfer") is not None


@dataclass(frozen=True, eq=False)
class Sequences:
    """One layer in FlashInfer's form: S sequences of `kv_heads` KV heads.

    On the host, as its planners need them: `indptr` [S + 1], `last_page_len` [S] and `lengths` [S].
    On the device: `indices`, and the keys and values `k` and `v` [blocks, kv_heads, P, D].
    """

    kv_heads: int
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(
        cls, rows: DecodeRows, layer: int, tables: Int32, lengths: Int32, pool: Tensor
    ) -> Sequences:
        """One layer of `rows`, from the flat host arrays `tables` and `lengths`.

        Raises `ConfigError` if the layer has a sliding window.
        """
        if rows.windows[layer] is not None:
            raise ConfigError(
                f"layer {layer} has a sliding window of {rows.windows[layer]} tokens: use our "
                "kernels"
            )
        per_page, size = pool.shape[1], pool.shape[3]
        length = lengths[rows.length_index[:, layer]].astype(np.int64)
        table, column = (x[:, layer].astype(np.int64) for x in (rows.table, rows.column))
        width = per_page if _whole_pages(table, column, length, per_page) else 1
        table, column, length = (x[:, ::width].ravel() for x in (table, column, length))
        pages = -(-length // size)
        indptr = np.append(0, np.cumsum(pages))
        cell = np.repeat(np.arange(len(pages)), pages)
        step = np.arange(indptr[-1]) - indptr[:-1][cell]
        block = tables[table[cell] + step].astype(np.int64)
        if width == 1:
            block = block * per_page + column[cell]
        blocks = pool.view(-1, width, 2, size, pool.shape[4])
        return cls(
            width,
            on_host(indptr),
            on_host(block).to(pool.device),
            on_host(length - (pages - 1) * size),
            on_host(length),
            blocks[:, :, 0],
            blocks[:, :, 1],
        )

    @property
    def count(self) -> int:
        """S."""
        return len(self.last_page_len)

    def queries(self, q: Tensor) -> Tensor:
        """Q [R, Q, D] as [S, G · kv_heads, D], without a copy."""
        return q.view(self.count, -1, q.shape[2])


def _whole_pages(
    table: npt.NDArray[Any], column: npt.NDArray[Any], length: npt.NDArray[Any], per_page: int
) -> bool:
    """Whether each run of Hp heads, of [R, H], shares table and length, in column order."""
    rows, heads = table.shape
    if heads % per_page:
        return False
    table, column, length = (x.reshape(rows, -1, per_page) for x in (table, column, length))
    same = bool((table == table[..., :1]).all() and (length == length[..., :1]).all())
    return same and bool((column == np.arange(per_page)).all())


def on_host(values: npt.ArrayLike) -> Tensor:
    """An int32 tensor on the host, as FlashInfer's planners require."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper with tensor cores, one wrapper a layer.

    It must plan at every step. `layers` are those of the first step, `workspace` uint8 of
    `WORKSPACE_BYTES`. With `graph` its runs can be captured: later steps then need as many
    sequences and at most as many pages. Without it the grid fits this batch alone.
    """

    def __init__(
        self, layers: Sequence[Sequences], workspace: Tensor, *, graph: bool = True
    ) -> None:
        import flashinfer

        self._wrappers = [
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "HND",
                use_cuda_graph=graph,
                use_tensor_cores=True,
                **(_graph_buffers(seqs, workspace.device) if graph else {}),
            )
            for seqs in layers
        ]

    def plan(
        self,
        layers: Sequence[Sequences],
        *,
        group: int,
        scaling: float,
        q_dtype: torch.dtype,
        softcap: float | None = None,
    ) -> None:
        """FlashInfer's own planning of every layer; `group` is G."""
        for wrapper, seqs in zip(self._wrappers, layers, strict=True):
            wrapper.plan(
                seqs.indptr,
                seqs.indices,
                seqs.last_page_len,
                seqs.kv_heads * group,
                seqs.kv_heads,
                seqs.k.shape[3],
                seqs.k.shape[2],
                q_data_type=q_dtype,
                kv_data_type=seqs.k.dtype,
                sm_scale=scaling,
                logits_soft_cap=softcap,
            )

    def attend(self, layer: int, seqs: Sequences, q: Tensor, out: Tensor) -> None:
        """One layer of the planned step: q [R, Q, D] → out [R, Q, D]."""
        self._wrappers[layer].run(seqs.queries(q), (seqs.k, seqs.v), out=seqs.queries(out))


def _graph_buffers(seqs: Sequences, device: torch.device) -> dict[str, Tensor]:
    return {
        "paged_kv_indptr_buffer": torch.empty(seqs.count + 1, dtype=torch.int32, device=device),
        "paged_kv_indices_buffer": torch.empty(len(seqs.indices), dtype=torch.int32, device=device),
        "paged_kv_last_page_len_buffer": torch.empty(seqs.count, dtype=torch.int32, device=device),
    }
