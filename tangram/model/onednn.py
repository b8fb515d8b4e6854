"""Linear maps on an x86 CPU by oneDNN, their weights in the order in which it reads them.

`torch.nn.functional.linear` in float32 is MKL's product. With 2 to 16 rows it reads weights at a
fraction of the memory's speed. Its last bits depend on how many rows there are (docs/cpu.md). The
product of packed weights, which torch.compile takes too, does neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """y = x·Wᵀ + b, whose `weight` [N, K] lies in oneDNN's own order; made by `pack_weights`."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return product

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.to_dense()


def pack_weights(model: nn.Module) -> None:
    """Pack, in place, the linear maps of `model` that oneDNN multiplies fast on this CPU.

    These are float32 maps on x86, and bfloat16 maps where the CPU has instructions for them. The
    old weights are freed, unless something else holds them, as a tied embedding does. A packed map
    stays so.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return
    packable = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packable.add(torch.bfloat16)
    for part in model.modules():
        if type(part) is nn.Linear and part.weight.is_cpu and part.weight.dtype in packable:
            packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), None)
            part.weight = nn.Parameter(packed, requires_grad=False)
            part.__class__ = PackedLinear
