"""Weights as numbers of 8 or 4 bits and their scales: what products on a CPU and a GPU share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

GROUP = 32  # inputs that share a 4-bit scale, as in a GGUF block
_MOST_8, _MOST_4 = 127, 15
_HALF_4 = 8  # what stands for zero in unsigned numbers
_STEP_COUNTS = tuple(range(_MOST_4, _HALF_4 - 1, -1))
_LEVEL_ERROR = 0.1  # of a step: weights in bfloat16 lie beside their levels
_SAMPLE = 256  # groups


def row_scales(rows: Tensor) -> Tensor:
    """What a step of 8 bits is in each row [T, K], [T, 1], float32."""
    # No constant of the module: torch.compile would take that for one that may change.
    return rows.abs().amax(-1, keepdim=True).float().clamp_min_(1e-30).div_(_MOST_8)


def round_to_8_bits(
    weight: Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Numbers of -127 to 127 [N, K], int8, and a scale for each row [N], in `scale_dtype`.

    A weight is its number times the scale of its row.
    """
    scales = row_scales(weight).to(scale_dtype)
    # A scale that was rounded down would make more than 127 of a row's largest weight.
    steps = weight.div(scales.float()).round_().clamp_(-_MOST_8, _MOST_8)
    return steps.to(torch.int8), scales.flatten()


def round_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers q [N, K/GROUP, GROUP] of 0 to 15, int32, and [N, K/GROUP, 2] of scale and offset.

    A weight is (q - 8) · scale + offset. Weights of 16 even levels, as in blocks of GGUF's Q4_0,
    Q4_1 and Q4_K, keep these. Otherwise the extremes of a group are 0 and 15.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / _count_steps(groups, low, high)
    scales = torch.stack([step, low + _HALF_4 * step], -1).to(torch.bfloat16)
    step, offset = scales.float().unsqueeze(2).unbind(-1)
    step = step.masked_fill(step == 0, 1.0)  # a group of one value, which is its offset
    rounded = groups.sub(offset).div_(step).round_().add_(_HALF_4).clamp_(0, _MOST_4)
    return rounded.to(torch.int32), scales


def _count_steps(groups: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Into how many steps `low` to `high` [N, K/GROUP] are divided, 8 to 15.

    These are the most of which all weights of a group are multiples, or 15 if there are none. Fewer
    than 8 need no search: twice or three times as many are the same levels.
    """
    places = groups.sub(low[..., None]).div_((high - low).clamp_min(1e-30)[..., None]).flatten(0, 1)
    steps = torch.full((len(places),), float(_MOST_4), device=places.device)
    unfit = torch.arange(len(places), device=places.device)
    # Most weights have no levels, which some groups tell.
    some = places[:: max(1, len(places) // _SAMPLE)]
    if not any(_are_multiples(some, count).any() for count in _STEP_COUNTS):
        return steps.view_as(low)
    for count in _STEP_COUNTS:
        fits = _are_multiples(places[unfit], count)
        steps[unfit[fits]] = count
        unfit = unfit[~fits]
    return steps.view_as(low)


def _are_multiples(places: Tensor, count: int) -> Tensor:
    """Whether all of a row of `places` [G, GROUP], 0 to 1, are multiples of 1/`count`, [G]."""
    asked = places * count
    return asked.sub_(asked.round()).abs_().amax(-1) < _LEVEL_ERROR


class RoundedLinear(nn.Module, ABC):
    """y = x·Wᵀ + b, W [N, K] rounded; the output has the dtype of x.

    A row's product does not depend on what the rows beside it hold.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.bias = source.bias

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """The product of rows [T, K] with W, [T, N], in their dtype or in float32; T > 0."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        product = self.multiply(rows)
        if self.bias is not None:
            product = product.add_(self.bias)
        return product.to(x.dtype).view(*x.shape[:-1], self.out_features)
