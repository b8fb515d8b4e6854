"""Products of experts that a CUDA graph can hold.

Transformers sorts rows by their expert and calls PyTorch's grouped product
(`torch.nn.functional.grouped_mm`). That is one kernel in bfloat16 on cards of compute capability
9.0 and 10.0. Elsewhere the host reads how many rows each expert has, and no CUDA graph can hold
that. Here a pass of few tokens has the same launches wherever its tokens are sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

IMPLEMENTATION = "tangram"
_ONE_KERNEL = ((9, 0), (10, 0))  # cards on which the grouped product of bfloat16 is one kernel
# A loop over experts launches several kernels for each. All experts' products of as many tokens as
# this take no longer on a large card.
_MOST_TOKENS = 1024
_COPY = 3  # a copied weight is read, written and read again


def fix_launches(model: PreTrainedModel) -> None:
    """Let passes of up to 1,024 tokens launch the same kernels for any choice of experts.

    `model` lies on a GPU. Models without experts, and those whose experts Transformers lets nobody
    replace, stay as they are.
    """
    if launches_vary(model, model.device):
        model.set_experts_implementation(IMPLEMENTATION)


def launches_vary(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the kernels of a pass depend on the choice of experts on `device`, a GPU."""
    grouped = "grouped_mm" in model.get_experts_implementation().values()
    one_kernel = torch.cuda.get_device_capability(device) in _ONE_KERNEL
    return grouped and not (model.dtype is torch.bfloat16 and one_kernel)


def compute_experts(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The sum [T, D] of what the `chosen` experts [T, K] make of `hidden` [T, D].

    `shares` [T, K] are their weights. `experts` is a module with the attributes that Transformers'
    `use_experts_implementation` sets. Each weight is read once, or the few that are chosen are
    copied first.
    """
    others: Any = ExpertsInterface()  # type: ignore[no-untyped-call]
    tokens = hidden.shape[0]
    if tokens > _MOST_TOKENS:
        result: Tensor = others["grouped_mm"](experts, hidden, chosen, shares)
    elif _COPY * tokens * chosen.shape[1] < experts.num_experts:
        result = others["batched_mm"](experts, hidden, chosen, shares)
    else:
        result = _ask_all(experts, hidden, chosen, shares)
    return result


ExpertsInterface.register(IMPLEMENTATION, compute_experts)


def _ask_all(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """`compute_experts` by every expert's answer to every token."""
    tokens, count = hidden.shape[0], experts.num_experts
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _multiply(experts, name, hidden.expand(count, -1, -1)).flatten(0, 1)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _multiply(experts, "down_proj", inner.view(count, tokens, -1))
    if experts.has_post_expert_norm:
        out = experts.post_expert_norm(out)
    # Of several ranks each has a part of the experts, and a number behind the last for all others.
    given = shares.new_zeros(tokens, count + 1)
    given = given.scatter(1, chosen.clamp(max=count), shares)[:, :count].t().unsqueeze(-1)
    # What was not asked for may be infinite, and 0 times that is no number.
    summed = torch.where(given == 0, 0, out * given).sum(0)
    return summed.to(hidden.dtype)


def _multiply(experts: nn.Module, name: str, x: Tensor) -> Tensor:
    """The product of each expert [E, T, ...] with its part of `x` [E, T, ...]."""
    weight: Tensor = getattr(experts, name)
    product = torch.bmm(x, weight if experts.is_transposed else weight.mT)
    return product + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else product
