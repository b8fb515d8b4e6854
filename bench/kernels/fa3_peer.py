"""FlashAttention 3 over pages, as vLLM ships and calls it, as a contender.

It needs `vllm.vllm_flash_attn` (vLLM 0.24) and a card of compute capability 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tangram_lab.kernel_benchmarks.flashinfer import Sequences
from tangram_lab.kernel_benchmarks.flashinfer_contender import layers_of
from tangram_lab.kernel_benchmarks.timing import NotApplicable
from tangram_lab.kernel_benchmarks.workloads import Workload

LIMIT_BYTES = 36 << 30  # of its copy, beside the pool
# vLLM's defaults: it captures steps of so many rows, and gives captured ones so many splits. In
# other steps FlashAttention chooses the number.
CAPTURED_ROWS, CAPTURED_SPLITS = 512, 32


def block_table(seqs: Sequences) -> Tensor:
    """[S, most pages] of int32 on the device: each sequence's pages, then zeros."""
    pages = seqs.indptr.diff()
    table = torch.zeros(seqs.count, int(pages.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < pages[:, None]] = seqs.indices.cpu()
    return table.to(seqs.indices.device)


def copy_pages(layers: Sequence[Sequences]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer as [pages, P, KV heads, D]; layers of one form share theirs."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for seqs in layers:
        if seqs.kv_heads not in made:
            k, v = (x.transpose(1, 2).contiguous() for x in (seqs.k, seqs.v))
            made[seqs.kv_heads] = k, v
    return [made[seqs.kv_heads] for seqs in layers]


class PagedLayer:
    """What one layer's call reads: its pages, its sequences and the scheduler's metadata."""

    def __init__(self, seqs: Sequences, pages: tuple[Tensor, Tensor], group: int) -> None:
        device = seqs.indices.device
        self.seqs, self.pages = seqs, pages
        self.heads = seqs.kv_heads * group
        self.table, self.lengths = block_table(seqs), seqs.lengths.to(device)
        self.longest = int(seqs.lengths.max())
        self.first_query = torch.arange(seqs.count + 1, dtype=torch.int32, device=device)
        self.splits = CAPTURED_SPLITS if seqs.count <= CAPTURED_ROWS else 0
        self.metadata: Tensor | None = None

    def schedule(self, get_scheduler_metadata: Any, dtype: torch.dtype) -> None:
        """Make the metadata, always in the same place, as a captured call reads it there."""
        made = get_scheduler_metadata(
            batch_size=self.seqs.count,
            max_seqlen_q=1,
            max_seqlen_k=self.longest,
            num_heads_q=self.heads,
            num_heads_kv=self.seqs.kv_heads,
            headdim=self.pages[0].shape[3],
            cache_seqlens=self.lengths,
            qkv_dtype=dtype,
            cu_seqlens_q=self.first_query,
            page_size=self.pages[0].shape[1],
            causal=True,
            window_size=(-1, -1),
            num_splits=self.splits,
        )
        if self.metadata is None:
            self.metadata = made
        else:
            self.metadata.copy_(made)


class FlashAttention3:
    """Each row reads all its tokens. The pool is copied once, into vLLM's order of a page.

    Metadata are made for each layer and step; vLLM makes them for each group of equal layers.
    """

    each_step = True
    replans = True
    name = "vllm fa3"

    def __init__(self, workload: Workload) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        case = workload.case
        if case.geometry.element_bytes != 2:
            raise NotApplicable("its queries would have to be in FP8 too")
        if case.pool_bytes > LIMIT_BYTES:
            raise NotApplicable(
                f"its copy takes {case.pool_bytes / 2**30:.0f} GiB, the limit is "
                f"{LIMIT_BYTES >> 30}"
            )
        self._attend, self._get_metadata = flash_attn_varlen_func, get_scheduler_metadata
        self._workload, layers = workload, layers_of(workload)
        self._layers = [
            PagedLayer(seqs, pages, case.geometry.group)
            for seqs, pages in zip(layers, copy_pages(layers), strict=True)
        ]
        self._outs = [torch.empty_like(q) for q in workload.q]

    def plan(self) -> None:
        """The scheduler's metadata of every layer."""
        for layer in self._layers:
            layer.schedule(self._get_metadata, self._workload.dtype)

    def run(self) -> list[Tensor]:
        """All layers."""
        for layer, q, out in zip(self._layers, self._workload.q, self._outs, strict=True):
            keys, values = layer.pages
            self._attend(
                q=layer.seqs.queries(q),
                k=keys,
                v=values,
                out=layer.seqs.queries(out),
                cu_seqlens_q=layer.first_query,
                max_seqlen_q=1,
                seqused_k=layer.lengths,
                max_seqlen_k=layer.longest,
                softmax_scale=self._workload.scaling,
                causal=True,
                window_size=[-1, -1],
                block_table=layer.table,
                scheduler_metadata=layer.metadata,
                num_splits=layer.splits,
                fa_version=3,
            )
        return self._outs
