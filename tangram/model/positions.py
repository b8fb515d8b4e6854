"""Tells attention that counts tokens their positions.

Llama 4 scales the queries of some layers by the position. It asks the cache how many tokens precede
those of the call. In a pass of several rows that is another number for each token, which what plays
the cache gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from tangram.model.modules import copy_function

_COUNTS = "get_seq_length"


@dataclass(frozen=True, eq=False)
class PassPositions:
    """Plays Transformers' cache for one pass of tokens at `positions` [T]."""

    positions: Tensor

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[T]: how many tokens precede each, less its place in the pass."""
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """What attention reads: the keys and values of the pass. Its context has those before."""
        return key, value


def find_counting(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` whose attention counts the tokens in the cache."""
    return [
        layer
        for layer in model.modules()
        for name, part in layer.named_children()
        if name == "self_attn" and _COUNTS in unwrap(type(part).forward).__code__.co_names
    ]


def tell_positions(model: nn.Module) -> None:
    """From now on `find_counting` layers that get no cache get `PassPositions`."""
    for layer in find_counting(model):
        layer.register_forward_pre_hook(copy_function(_give_positions), with_kwargs=True)


def _give_positions(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    if kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "past_key_values": PassPositions(kwargs["position_ids"][0])}
    return args, kwargs
