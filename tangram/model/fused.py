"""Projections of one input as one matrix product: queries, keys and values; gate and up.

With few rows a narrow product leaves most of a GPU idle, and each product has a launch. The joined
weights need one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Transformers' names of the linear maps that read the same tensor.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)


class _JoinedMaps(nn.Module):
    """Several linear maps as one, their weights end to end.

    The product of an input is kept until each map has taken its part.
    """

    def __init__(self, maps: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in maps]
        weight = torch.cat([part.weight.data for part in maps])
        biases = [part.bias.data for part in maps if part.bias is not None]
        rows, columns = weight.shape
        self.product = nn.Linear(columns, rows, bias=bool(biases), device="meta")
        self.product.weight = nn.Parameter(weight, requires_grad=False)
        if biases:
            self.product.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        self._apart = False  # true for a model whose maps turn out to read different tensors

    def part(self, number: int, x: Tensor) -> Tensor:
        """The output of map `number` for `x`."""
        if self._input is not None and self._input is not x:
            self._apart, self._input, self._parts = True, None, {}
        if self._apart:
            return torch.split(self.product(x), self.sizes, dim=-1)[number]
        if number not in self._parts:
            parts = torch.split(self.product(x), self.sizes, dim=-1)
            self._input, self._parts = x, dict(enumerate(parts))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


class _Part(nn.Module):
    def __init__(self, joined: _JoinedMaps, number: int) -> None:
        super().__init__()
        self.joined, self.number = joined, number

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.part(self.number, x)


def join_projections(model: nn.Module) -> None:
    """Replace the maps that read the same tensor in every layer of `model` by joined ones.

    Outputs do not change.
    """
    for module in list(model.modules()):
        for names in TOGETHER:
            maps: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(part) is nn.Linear for part in maps) and _are_alike(maps):
                joined = _JoinedMaps(maps)
                for number, name in enumerate(names):
                    setattr(module, name, _Part(joined, number))


def _are_alike(maps: list[Any]) -> bool:
    kinds = {
        (part.in_features, part.bias is None, part.weight.dtype, part.weight.device)
        for part in maps
    }
    return len(kinds) == 1
