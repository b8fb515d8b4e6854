"""A case with tensors: the pool filled with random entries, the queries, and the fp32 answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram_lab.kernel_benchmarks.case import Case

REFERENCE_BYTES = 2 << 30  # gathered fp32 keys and values at a time


@dataclass(frozen=True, eq=False)
class Workload:
    """`pool` [N_pages, Hp, 2, P, D], `q` L tensors [R, Q, D], `tables` and `lengths` flat int32,
    all on one device. Queries have a dtype of their own where the pool is in FP8.
    """

    case: Case
    pool: Tensor
    q: tuple[Tensor, ...]
    tables: Tensor
    lengths: Tensor

    @classmethod
    def build(cls, case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Workload:
        """Random keys, values and queries (never zeros); unit variance, so that scores are neither
        flat nor peaked.
        """
        geometry = case.geometry
        torch.manual_seed(seed)
        shape = (case.pages, geometry.heads_per_page, 2, geometry.page_tokens, geometry.head_dim)
        q_shape = (case.shape[0], geometry.query_heads, geometry.head_dim)
        return cls(
            case,
            _draw_entries(shape, dtype, geometry.element_bytes, device),
            tuple(torch.randn(q_shape, dtype=dtype, device=device) for _ in range(case.shape[1])),
            torch.from_numpy(case.tables).to(device),
            torch.from_numpy(case.lengths).to(device),
        )

    @property
    def scaling(self) -> float:
        """1 / sqrt(D)."""
        return 1.0 / math.sqrt(self.case.geometry.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of queries."""
        return self.q[0].dtype

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.pool.device


def _draw_entries(
    shape: tuple[int, ...], dtype: torch.dtype, element_bytes: int, device: torch.device
) -> Tensor:
    """Random entries; FP8 ones page by page, since the whole may not fit twice."""
    if element_bytes == 2:
        return torch.randn(shape, dtype=dtype, device=device)
    pool = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for pages in torch.split(pool, 1024):
        pages.copy_(torch.randn(pages.shape, dtype=dtype, device=device))
    return pool


def compute_expected(workload: Workload) -> list[Tensor]:
    """The answer of each layer [R, Q, D] in float32: gathered, full-precision products, one
    softmax, no tiling.
    """
    case, geometry = workload.case, workload.case.geometry
    rows, layers, heads = case.shape
    answers = []
    for layer in range(layers):
        queries = workload.q[layer].view(rows * heads, geometry.group, geometry.head_dim)
        out = torch.empty(queries.shape, dtype=torch.float32, device=workload.device)
        for cells in _chunks(case.cell_lengths[:, layer].ravel(), case.entry_bytes * 2):
            out[cells] = _attention(workload, layer, cells, queries[cells].float())
        answers.append(out.view(rows, geometry.query_heads, geometry.head_dim))
    return answers


def _chunks(lengths: np.ndarray, bytes_each: int) -> Iterator[np.ndarray]:
    """Cells (row · H + head) in runs of similar length, which bounds padding and memory."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        count = max(1, REFERENCE_BYTES // max(1, int(lengths[order[begin]]) * bytes_each))
        yield order[begin : begin + count]
        begin += count


def _attention(workload: Workload, layer: int, cells: np.ndarray, queries: Tensor) -> Tensor:
    """[n, G, D] of queries [n, G, D] over the padded entries of n cells."""
    keys, values = gather(workload, layer, cells)
    length = workload.case.cell_lengths[:, layer].ravel()[cells]
    hidden = (
        torch.arange(keys.shape[1], device=keys.device)
        >= torch.from_numpy(length).to(keys.device)[:, None]
    )
    scores = (queries @ keys.float().transpose(1, 2) * workload.scaling).masked_fill(
        hidden[:, None], -torch.inf
    )
    return torch.softmax(scores, -1) @ values.float()


def gather(workload: Workload, layer: int, cells: np.ndarray) -> tuple[Tensor, Tensor]:
    """Keys and values [n, longest, D] of n cells (row · H + head), padded with entries of the
    cells' last pages.
    """
    case, size = workload.case, workload.case.geometry.page_tokens
    table, column = (x[:, layer].ravel()[cells] for x in (case.rows.table, case.rows.column))
    pages = -(-case.cell_lengths[:, layer].ravel()[cells] // size)
    step = np.minimum(np.arange(pages.max()), pages[:, None] - 1)
    block = (
        case.tables[table[:, None] + step].astype(np.int64) * case.geometry.heads_per_page
        + column[:, None]
    )
    index = torch.from_numpy(block).to(workload.device)
    blocks = workload.pool.view(-1, *workload.pool.shape[2:])
    codes = blocks.view(torch.uint8) if blocks.dtype.itemsize == 1 else blocks  # no FP8 by index
    keys, values = (codes[:, half][index].flatten(1, 2) for half in (0, 1))
    return keys.view(blocks.dtype), values.view(blocks.dtype)
