"""Our pool as FlashInfer reads it, in place.

Where all heads of a page belong to one layer and share table and length, each run of Hp heads is a sequence with Hp KV
heads in its HND layout (for Hp = H that is one ordinary sequence a request). Where pages mix heads of any length, each
(row, head) is a sequence with one KV head over *virtual blocks*, page · Hp + column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.kernels.case import Case
from bench.kernels.workloads import Workload


@dataclass(frozen=True, eq=False)
class Sequences:
    """One layer as FlashInfer sees it: S sequences of `kv_heads` KV heads and G · kv_heads query heads.

    `indptr` [S + 1] and `last_page_len` [S] are on the host, as its planners want them; `indices` on the device.
    """

    kv_heads: int
    query_heads: int
    head_dim: int
    page_tokens: int
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, workload: Workload, layer: int) -> Sequences:
        case, geometry = workload.case, workload.case.geometry
        width = geometry.heads_per_page if _whole_pages(case, layer) else 1
        table, column, length = (
            x[:, layer, ::width].ravel() for x in (case.rows.table, case.rows.column, case.cell_lengths)
        )
        size = geometry.page_tokens
        pages = -(-length // size)
        indptr = np.append(0, np.cumsum(pages))
        cell = np.repeat(np.arange(len(pages)), pages)
        step = np.arange(indptr[-1]) - indptr[:-1][cell]
        block = case.tables[table[cell] + step].astype(np.int64)
        if width == 1:
            block = block * geometry.heads_per_page + column[cell]
            flat = workload.pool.view(-1, 1, 2, size, geometry.head_dim)
        else:
            flat = workload.pool
        return cls(
            width, width * geometry.group, geometry.head_dim, size, on_host(indptr),
            on_host(block).to(workload.device), on_host(length - (pages - 1) * size), on_host(length),
            flat[:, :, 0], flat[:, :, 1],
        )  # fmt: skip

    @property
    def count(self) -> int:
        """S."""
        return len(self.last_page_len)

    def queries(self, q: Tensor) -> Tensor:
        """q [R, Q, D] as [S, G · kv_heads, D], without a copy."""
        return q.view(self.count, self.query_heads, self.head_dim)


def _whole_pages(case: Case, layer: int) -> bool:
    """Whether each run of Hp heads of the layer shares table and length and fills its pages in column order."""
    per_page = case.geometry.heads_per_page
    rows, _, heads = case.shape
    if heads % per_page:
        return False
    table, column, length = (
        x[:, layer].reshape(rows, -1, per_page) for x in (case.rows.table, case.rows.column, case.cell_lengths)
    )
    same = bool((table == table[..., :1]).all() and (length == length[..., :1]).all())
    return same and bool((column == np.arange(per_page)).all())


def on_host(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
