"""Transformers' layers through torch.compile.

Norms, rotations and gates become few kernels (torch, Inductor). Attention stays outside: a step's
attention is an object that changes, and its kernels are launched as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tangram.model.attention import IMPLEMENTATION, attention
from tangram.model.gpu_weights import Int4GpuLinear, Int8GpuLinear
from tangram.model.own_code import copy_function


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every layer at its first call, once for each kind of layer and any number of tokens.

    So is a head with rounded weights. What is compiled already stays so: several engines may use
    one model one after the other. `backend` is torch.compile's.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    copies = dict[type, FunctionType]()
    compiled = dict[type, Callable[..., Any]]()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and "forward" not in vars(layer):
            for part in layer.modules():
                # Those that are left where attention begins, which is outside.
                if part is not layer and any(hasattr(one, "layer_idx") for one in part.modules()):
                    own = copies.setdefault(type(part), copy_function(type(part).forward))
                    vars(part)["forward"] = MethodType(own, part)
            kind = type(layer)
            if kind not in compiled:
                own = copy_function(kind.forward)
                compiled[kind] = torch.compile(own, dynamic=True, backend=backend)
            vars(layer)["forward"] = MethodType(compiled[kind], layer)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # Rounding and widening are many operations, and the head is in no layer.
    if isinstance(head, Int8GpuLinear | Int4GpuLinear) and "forward" not in vars(head):
        own = copy_function(type(head).forward)
        vars(head)["forward"] = MethodType(torch.compile(own, dynamic=True, backend=backend), head)
