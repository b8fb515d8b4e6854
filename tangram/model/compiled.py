"""Transformers' layers through torch.compile.

Norms, rotations and gates become few kernels (torch, Inductor). Attention stays outside: a step's
attention is an object that changes, and its kernels are launched as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tangram.model.attention import IMPLEMENTATION, attention
from tangram.model.gpu_weights import Int4GpuLinear, Int8GpuLinear


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every layer at its first call, once for each kind of layer and any number of tokens.

    So is a head with rounded weights. What is compiled already stays so: several engines may use
    one model one after the other.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module._compiled_call_impl is None:
            nn.Module.compile(module, dynamic=True)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # Rounding and widening are many operations, and the head is in no layer. Its own method is
    # compiled: torch counts the graphs of all modules that are compiled whole against one limit.
    if isinstance(head, Int8GpuLinear | Int4GpuLinear) and "forward" not in vars(head):
        vars(head)["forward"] = torch.compile(head.forward, dynamic=True)
