"""torch's attention over contiguous keys and values: the control without pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tangram_lab.kernel_benchmarks.timing import NotApplicable
from tangram_lab.kernel_benchmarks.workloads import Workload, gather

SDPA_LIMIT_BYTES = 12 << 30


class TorchAttention:
    """SDPA over keys and values that are gathered into contiguous, padded tensors before.

    The G query heads of a KV head are queries of one sequence, so that nothing is repeated.
    """

    each_step = False
    replans = True
    name = "torch sdpa (gathered)"

    def __init__(self, workload: Workload) -> None:
        case = workload.case
        rows, layers, heads = case.shape
        longest = (
            -(-int(case.cell_lengths.max()) // case.geometry.page_tokens)
            * case.geometry.page_tokens
        )
        needed = rows * layers * heads * longest * case.entry_bytes
        if needed > SDPA_LIMIT_BYTES:
            raise NotApplicable(
                f"padded copies take {needed / 2**30:.0f} GiB, the limit is "
                f"{SDPA_LIMIT_BYTES >> 30}"
            )
        self._workload = workload
        self._layers = [self._gather(layer) for layer in range(layers)]

    def _gather(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, _, heads = self._workload.case.shape
        keys, values = gather(self._workload, layer, np.arange(rows * heads))
        length = torch.from_numpy(self._workload.case.cell_lengths[:, layer].ravel()).to(
            keys.device
        )
        mask = torch.arange(keys.shape[1], device=keys.device)[None, None, None, :] < length.view(
            rows, heads, 1, 1
        )
        k, v = (x.view(rows, heads, *x.shape[1:]) for x in (keys, values))
        group = self._workload.case.geometry.group
        return k, v, None if bool(mask.all()) else mask.expand(rows, heads, group, -1)

    def plan(self) -> None:
        """Nothing."""

    def run(self) -> list[Tensor]:
        """All layers."""
        rows, _, heads = self._workload.case.shape
        outs = []
        for q, (k, v, mask) in zip(self._workload.q, self._layers, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.view(rows, heads, -1, q.shape[-1]),
                k,
                v,
                attn_mask=mask,
                scale=self._workload.scaling,
            )
            outs.append(out.reshape(q.shape))
        return outs
