"""Other libraries as contenders: FlashInfer's decode, BatchAttention and cascade, FastTree,
FlashAttention 3, and torch's SDPA.

Index arrays are made before the measurement: FlashInfer's `plan()` is timed alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.kernels.fa3_peer import FlashAttention3
from bench.kernels.family import PEERS
from bench.kernels.fasttree_peer import FastTree
from bench.kernels.sdpa import TorchAttention
from tangram.types import Int32
from tangram_lab.kernel_benchmarks.flashinfer import on_host
from tangram_lab.kernel_benchmarks.flashinfer_contender import Library, layers_of
from tangram_lab.kernel_benchmarks.timing import Contender, NotApplicable
from tangram_lab.kernel_benchmarks.workloads import Workload


class FlashInferBatch:
    """BatchAttention: one persistent kernel with its own split and merge.

    One object a layer; each owns 384 MiB.
    """

    each_step = True
    replans = True
    name = "flashinfer batch"

    def __init__(self, workload: Workload, most_layers: int = 32) -> None:
        from flashinfer.attention import BatchAttention

        if workload.case.shape[1] > most_layers:
            raise NotApplicable(
                f"{workload.case.shape[1]} layers need a workspace each, at most {most_layers}"
            )
        self._workload = workload
        self._layers, self._geometry = layers_of(workload), workload.case.geometry
        self._outs = [torch.empty_like(q) for q in workload.q]
        device = workload.device
        self._wrappers = [BatchAttention("HND", device=str(device)) for _ in self._layers]
        self._indptr = [
            (torch.arange(seqs.count + 1, dtype=torch.int32), seqs.indptr, seqs.lengths)
            for seqs in self._layers
        ]
        self._lse = [
            torch.empty(
                seqs.count, seqs.kv_heads * self._geometry.group, dtype=torch.float32, device=device
            )
            for seqs in self._layers
        ]

    def plan(self) -> None:
        """Its plan of every layer."""
        work, size = self._workload, self._geometry
        for wrapper, seqs, (qo, kv, lengths) in zip(
            self._wrappers, self._layers, self._indptr, strict=True
        ):
            wrapper.plan(
                qo,
                kv,
                seqs.indices,
                lengths,
                seqs.kv_heads * size.group,
                seqs.kv_heads,
                size.head_dim,
                size.head_dim,
                size.page_tokens,
                causal=False,
                sm_scale=work.scaling,
                q_data_type=work.dtype,
                kv_data_type=work.pool.dtype,
            )

    def run(self) -> list[Tensor]:
        """All layers."""
        for wrapper, seqs, q, out, lse in zip(
            self._wrappers, self._layers, self._workload.q, self._outs, self._lse, strict=True
        ):
            wrapper.run(seqs.queries(q), (seqs.k, seqs.v), out=seqs.queries(out), lse=lse)
        return self._outs


class FlashInferCascade:
    """The work of MultiLevelCascadeAttentionWrapper: paged prefill per level, and in-place merges.

    It is built from the same parts with given outputs, which saves a memset a level. `backend`
    "auto", the wrapper's own choice, is "fa3" on Hopper.
    """

    each_step = True
    replans = True

    def __init__(self, workload: Workload, workspace: Tensor, backend: str) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        tree = workload.case.tree
        if tree is None or not tree.shared:
            raise NotApplicable("no prefix is shared")
        if workload.case.geometry.heads_per_page != workload.case.geometry.kv_heads:
            raise NotApplicable("its levels need pages that hold all KV heads")
        self.name, self._workload = f"flashinfer cascade {backend}", workload
        device, q = workload.device, workload.q[0]
        self._levels = _levels(workload)
        self._indices = [indices.to(device) for _, _, indices, _ in self._levels]
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                backend=backend,
                qo_indptr_buf=qo.to(device),
                paged_kv_indptr_buf=kv.to(device),
                paged_kv_indices_buf=indices.to(device),
                paged_kv_last_page_len_buf=last.to(device),
            )
            for qo, kv, indices, last in self._levels
        ]
        self._outs = [torch.empty_like(q) for _ in self._levels]
        self._lse = [
            torch.empty(q.shape[:2], dtype=torch.float32, device=device) for _ in self._levels
        ]
        self._pages = workload.pool[:, :, 0], workload.pool[:, :, 1]

    def plan(self) -> None:
        """Its plan of every level."""
        geometry, work = self._workload.case.geometry, self._workload
        for wrapper, (qo, kv, _, last), indices in zip(
            self._wrappers, self._levels, self._indices, strict=True
        ):
            wrapper.plan(
                qo,
                kv,
                indices,
                last,
                geometry.query_heads,
                geometry.kv_heads,
                geometry.head_dim,
                geometry.page_tokens,
                causal=False,
                sm_scale=work.scaling,
                q_data_type=work.dtype,
                kv_data_type=work.pool.dtype,
            )

    def run(self) -> list[Tensor]:
        """All levels, the leaves' first, then the merges."""
        from flashinfer import merge_state_in_place

        q = self._workload.q[0]
        parts = list(zip(self._wrappers, self._outs, self._lse, strict=True))[::-1]
        for number, (wrapper, out, lse) in enumerate(parts):
            wrapper.run(q, self._pages, out=out, lse=lse, return_lse=True)
            if number:
                merge_state_in_place(parts[0][1], parts[0][2], out, lse)
        return [parts[0][1]]


def _levels(workload: Workload) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per level: qo_indptr, kv_indptr, kv_indices and last_page_len of its nodes, on the host."""
    case, tree = workload.case, workload.case.tree
    if tree is None:
        return []
    size = case.geometry.page_tokens
    tables: Int32 = case.tables.reshape(tree.leaves, -1)
    levels, before = [], 0
    for level, (nodes, tokens) in enumerate(zip(tree.nodes, tree.tokens, strict=True)):
        # Leaves of a node are neighbours
        first = np.searchsorted(tree.path[:, level], np.arange(nodes))
        pages = tokens // size
        indices = tables[first, before : before + pages]
        indptr = np.arange(nodes + 1) * pages
        last = np.full(nodes, size)
        levels.append(
            (
                on_host(np.append(first, tree.leaves)),
                on_host(indptr),
                on_host(indices.ravel()),
                on_host(last),
            )
        )
        before += pages
    return levels


def peer(name: str, workload: Workload, workspace: Tensor) -> Contender:
    """A contender of `PEERS`. Raises `NotApplicable`, or `ImportError` without its library."""
    match name:
        case "decode" | "decode-static":
            return Library(workload, workspace, graph=name == "decode")
        case "batch":
            return FlashInferBatch(workload)
        case "cascade" | "cascade-fa3":
            return FlashInferCascade(workload, workspace, "fa3" if name.endswith("fa3") else "fa2")
        case "fasttree":
            return FastTree(workload)
        case "fa3":
            return FlashAttention3(workload)
        case "sdpa":
            return TorchAttention(workload)
    raise ValueError(f"peer is {name!r}, known are {', '.join(PEERS)}")
