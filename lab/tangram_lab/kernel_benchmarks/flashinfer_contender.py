"""FlashInfer's paged decode as a contender."""

from __future__ import annotations

import torch
from torch import Tensor

from tangram_lab.kernel_benchmarks.flashinfer import FlashInferDecode, Sequences
from tangram_lab.kernel_benchmarks.workloads import Workload


def layers_of(workload: Workload) -> list[Sequences]:
    """Every layer of the workload in FlashInfer's form."""
    case = workload.case
    return [
        Sequences.of(case.rows, layer, case.tables, case.lengths, workload.pool)
        for layer in range(case.shape[1])
    ]


class Library:
    """Index arrays are made before the measurement: `plan` is FlashInfer's own planning alone."""

    each_step = True

    def __init__(self, workload: Workload, workspace: Tensor, *, graph: bool = True) -> None:
        self.name, self.replans = "flashinfer decode" + ("" if graph else " static"), graph
        self._workload, self._layers = workload, layers_of(workload)
        self._outs = [torch.empty_like(q) for q in workload.q]
        self._decode = FlashInferDecode(self._layers, workspace, graph=graph)

    def plan(self) -> None:
        """Its plan of every layer."""
        work = self._workload
        self._decode.plan(
            self._layers, group=work.case.geometry.group, scaling=work.scaling, q_dtype=work.dtype
        )

    def run(self) -> list[Tensor]:
        """All layers."""
        for layer, (seqs, q, out) in enumerate(
            zip(self._layers, self._workload.q, self._outs, strict=True)
        ):
            self._decode.attend(layer, seqs, q, out)
        return self._outs
