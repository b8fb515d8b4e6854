"""Bfloat16 linear maps on an x86 CPU by oneDNN, their weights in the order in which it reads them.

`torch.nn.functional.linear` multiplies by oneDNN, too, but keeps the weights in the order of their
rows. With few rows the packed ones take two thirds to three quarters of the time (docs/cpu.md).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tangram.model.latent import is_absorbed

# Above so many inputs oneDNN adds up a single row in another order than one of several, and on a
# processor without bfloat16 products with any number. There a single row is computed twice.
_ONE_SUM = 1024
# With AMX the order of a row's sums depends on the number of rows where there are more than these.
_AMX_ROWS = 32


class PackedLinear(nn.Linear):
    """y = x·Wᵀ + b, whose `weight` [N, K] lies in oneDNN's own order; made by `pack_weights`.

    A row gets the same bits beside any number of others.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        if len(rows) <= _AMX_ROWS or not torch.cpu._is_amx_tile_supported():
            return self._multiply(rows).view(*x.shape[:-1], self.out_features)
        products = [self._multiply(part) for part in torch.split(rows, _AMX_ROWS)]
        return torch.cat(products).view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        one_sum = self.in_features <= _ONE_SUM and torch.cpu._is_avx512_bf16_supported()
        alone = len(rows) == 1 and not one_sum
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            torch.cat([rows] * 2) if alone else rows, self.weight, self.bias, "none", [], ""
        )
        return product[:1] if alone else product

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
    for name, part in model.named_modules():
        if is_packable(name, part):
            packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), None)
            part.weight = nn.Parameter(packed, requires_grad=False)
            part.__class__ = PackedLinear


def is_packable(name: str, part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module `name` is a bfloat16 map on a CPU whose weights nothing else reads."""
    return (
        type(part) is nn.Linear
        and part.weight.is_cpu
        and part.weight.dtype is torch.bfloat16
        and not is_absorbed(name)
    )
