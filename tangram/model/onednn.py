"""Bfloat16 linear maps on an x86 CPU by oneDNN, their weights in the order in which it reads them.

`torch.nn.functional.linear` multiplies by oneDNN, too, but keeps the weights in the order of their
rows. With few rows the packed ones take two thirds to three quarters of the time (docs/cpu.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Above so many inputs oneDNN adds up a single row in another order than one of several. There a
# single row is computed twice.
_ONE_SUM = 1024


class PackedLinear(nn.Linear):
    """y = x·Wᵀ + b, whose `weight` [N, K] lies in oneDNN's own order; made by `pack_weights`.

    A row gets the same bits beside any number of others.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        alone = self.in_features > _ONE_SUM and x.numel() == x.shape[-1]
        rows = torch.cat([x.view(1, -1)] * 2) if alone else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, "none", [], ""
        )
        return product[:1].view(*x.shape[:-1], -1) if alone else product

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.to_dense()


def pack_weights(model: nn.Module) -> None:
    """Pack, in place, the bfloat16 linear maps of `model`, where oneDNN multiplies them on x86.

    The old weights are freed, unless something else holds them, as a tied embedding does. A packed
    map stays so.
    """
    x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if not (x86 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for part in model.modules():
        if type(part) is nn.Linear and part.weight.is_cpu and part.weight.dtype is torch.bfloat16:
            packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), None)
            part.weight = nn.Parameter(packed, requires_grad=False)
            part.__class__ = PackedLinear
