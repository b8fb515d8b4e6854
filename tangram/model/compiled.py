"""Transformers' layers through torch.compile on a GPU.

Norms, rotations and gates become few kernels (torch, Inductor). Attention stays outside: a step's
attention is an object that changes, and its kernels are launched as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tangram.model.attention import attention
from tangram.model.latent import OURS
from tangram.model.modules import CompiledPart, copy_function, derive, remake, replace_modules
from tangram.model.recurrent import RowByRow
from tangram.model.rounding import RoundedLinear

IMPLEMENTATION = f"{OURS}-apart"  # of attention: what no compiler looks into
AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every layer at its first call, once for each kind of layer and any number of tokens.

    So is a head with rounded weights: rounding and widening are many operations. What is compiled
    already stays so: several engines may use one model one after the other. `backend` is
    torch.compile's.
    """
    model.set_attn_implementation(IMPLEMENTATION)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    @cache
    def apart(kind: type[Any]) -> type[nn.Module]:
        return derive(kind, forward=copy_function(kind.forward))

    @cache
    def whole(kind: type[Any]) -> type[nn.Module]:
        compiled = torch.compile(copy_function(kind.forward), dynamic=True, backend=backend)
        return derive(kind, CompiledPart, forward=compiled)

    def make(name: str, part: nn.Module) -> nn.Module:
        # These are left where attention begins, and are compiled apart from the layer.
        replace_modules(part, _attends, lambda _, inner: remake(inner, apart))
        return remake(part, whole)

    def is_chosen(name: str, part: nn.Module) -> bool:
        rounded = part is head and isinstance(part, RoundedLinear)
        return (rounded or is_layer(part)) and not isinstance(part, CompiledPart)

    replace_modules(model, is_chosen, make)


def is_layer(part: nn.Module) -> bool:
    """Whether it is one of Transformers' layers."""
    return isinstance(part, GradientCheckpointingLayer)


def _attends(name: str, part: nn.Module) -> bool:
    return not isinstance(part, RowByRow) and any(
        hasattr(inner, "layer_idx") for inner in part.modules()
    )
