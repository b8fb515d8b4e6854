"""Weights as numbers of 8 or 4 bits and their scales: what products on a CPU and a GPU share."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # inputs that share a 4-bit scale, as in a GGUF block
_MOST_8, _MOST_4 = 127, 15
_HALF_4 = 8  # what stands for zero in unsigned numbers


def row_scales(rows: Tensor) -> Tensor:
    """What a step of 8 bits is in each row [T, K], [T, 1], float32."""
    # No constant of the module: torch.compile would take that for one that may change.
    return rows.abs().amax(-1, keepdim=True).float().clamp_min_(1e-30).div_(_MOST_8)


def round_to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of -127 to 127 [N, K], int8, and a scale for each row [N], float32.

    A weight is its number times the scale of its row.
    """
    scales = row_scales(weight)
    return weight.div(scales).round_().to(torch.int8), scales.flatten()


def round_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers q [N, K/GROUP, GROUP] of 0 to 15, int32, and [N, K/GROUP, 2] of scale and offset.

    A weight is (q - 8) · scale + offset. The extremes of a group are 0 and 15, as in GGUF's Q4_1,
    so weights that were of this form are found again.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / _MOST_4
    scales = torch.stack([step, low + _HALF_4 * step], -1).to(torch.bfloat16)
    step, offset = scales.float().unsqueeze(2).unbind(-1)
    step = step.masked_fill(step == 0, 1.0)  # a group of one value, which is its offset
    rounded = groups.sub(offset).div_(step).round_().add_(_HALF_4).clamp_(0, _MOST_4)
    return rounded.to(torch.int32), scales


def finish_product(product: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`product` [T, N] plus `bias`, in the dtype and the shape of `x`."""
    if bias is not None:
        product.add_(bias)
    return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])
