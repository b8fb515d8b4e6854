"""Transformers' layers through torch.compile.

Norms, rotations and gates become few kernels (torch, Inductor). Attention stays outside: a step's
attention is an object that changes, and its kernels are launched as they are.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tangram.model.attention import IMPLEMENTATION, attention


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every layer at its first call, once for each kind of layer and any number of tokens.

    A layer that is compiled already stays so: several engines may use one model one after the
    other.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module._compiled_call_impl is None:
            nn.Module.compile(module, dynamic=True)
