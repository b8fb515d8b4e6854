"""One rank's share of a model that lies on several devices.

Transformers loads the weights by its own plan: a rank reads its rows and columns of the MLPs and
experts. Attention and the head are loaded whole and cut here, because which heads a rank has is
dealt by the profile (`tangram/compress/dealing.py`). Linear maps become plain ones, so that all
that is done with linear maps later works on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from tangram.errors import ModelError
from tangram.model.attention import IMPLEMENTATION
from tangram.model.auto_classes import make_model
from tangram.types import Geometry, Int64

_DEALT = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks"}


class SummedLinear(nn.Module):
    """y = x·Wᵀ + b, where each rank has some columns of W and the same columns of x."""

    def __init__(self, part: nn.Linear, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.part, self.bias = part, bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K / N] of this rank to […, M], the same on all ranks."""
        y: Tensor = self.part(x)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """y = x·Wᵀ + b, where each rank has some rows of W; the last `size` counts rows of all."""

    def __init__(self, part: nn.Linear, size: int) -> None:
        super().__init__()
        self.part, self.size = part, size

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, `size`], the same on all ranks."""
        y: Tensor = self.part(x).contiguous()
        parts = torch.empty((dist.get_world_size(), *y.shape), dtype=y.dtype, device=y.device)
        dist.all_gather(list(parts.unbind()), y)
        return parts.movedim(0, -2).flatten(-2)[..., : self.size]


def refuse_small_weights(config: PretrainedConfig, ranks: int) -> None:
    """Raise `ModelError` for a checkpoint of rounded weights: they are widened on one device."""
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"tensor_parallel_size is {ranks}, but config.json has a quantization_config: rounded "
            "weights are read on one device; set it to 1, or give a checkpoint of whole weights"
        )


def distributed_config(config: PretrainedConfig, ranks: int) -> DistributedConfig:
    """How Transformers loads a model of `config` onto `ranks`: its own plan, attention whole.

    Raises `ModelError` if Transformers has no plan for the model.
    """
    with torch.device("meta"):
        model: Any = make_model(config, IMPLEMENTATION)
    plan: dict[str, str] = model.tp_plan
    if not any("self_attn" in name for name in plan):
        raise ModelError(
            f"tensor_parallel_size is {ranks}, but Transformers has no plan for "
            f"{type(model).__name__} on several devices: use one"
        )
    whole = {
        name: "replicate"
        for name in plan
        if "self_attn" in name or name.endswith(("embed_tokens", "lm_head"))
    }
    return DistributedConfig(tp_size=ranks, tp_plan=whole)


@dataclass(frozen=True, eq=False)
class Share:
    """What `rank` of `ranks` computes of a model whose geometry is `whole`.

    `order` [L, H] lists the heads of each layer, those of rank 0 first.
    """

    whole: Geometry
    order: Int64
    rank: int
    ranks: int

    @property
    def geometry(self) -> Geometry:
        """That of the share."""
        heads, queries = (
            count // self.ranks for count in (self.whole.kv_heads, self.whole.query_heads)
        )
        return replace(self.whole, kv_heads=heads, query_heads=queries)


def take_share(model: PreTrainedModel, share: Share) -> None:
    """Leave of `model` what one rank computes.

    Raises `ModelError` if the model has a part that no rule deals.
    """
    if len(share.whole.kv_layers) > share.whole.layers:
        raise ModelError(
            f"tensor_parallel_size is {share.ranks}, but some layers read the keys of another "
            "layer, and no rule deals their heads: set it to 1"
        )
    for name, module in list(model.named_modules()):
        if module.__dict__.get("_is_hooked"):
            _make_plain(model, name, module)
    heads = slice(share.rank * share.geometry.kv_heads, (share.rank + 1) * share.geometry.kv_heads)
    for name, module in list(model.named_modules()):
        if hasattr(module, "k_proj") and hasattr(module, "layer_idx"):
            mine = torch.from_numpy(share.order[int(module.layer_idx), heads].copy())
            _deal(name, module, mine.to(model.device), share.whole)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rows = -(-share.whole.vocab_size // share.ranks)

    def cut(whole: Tensor) -> Tensor:
        """This rank's rows, filled up with zeros."""
        mine = whole[share.rank * rows : (share.rank + 1) * rows]
        return nn.functional.pad(mine, (*[0, 0] * (whole.ndim - 1), 0, rows - len(mine)))

    part = _linear(cut(head.weight.data), None if head.bias is None else cut(head.bias.data))
    model.set_output_embeddings(GatheredLinear(part, share.whole.vocab_size))  # type: ignore[no-untyped-call]


def _make_plain(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace what Transformers has distributed of `module` by the local tensors."""
    placements = [
        tuple(parameter.placements)
        for parameter in module.parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    weight = getattr(module, "weight", None)
    for key, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            setattr(module, key, nn.Parameter(parameter.to_local(), requires_grad=False))
    if placements and type(module) is not nn.Linear:
        return  # experts: Transformers sums what they return
    del module.__dict__["forward"]
    if not isinstance(weight, DTensor):
        return
    split = tuple(weight.placements)
    local: Any = module
    if split == (Shard(0),):
        model.set_submodule(name, _linear(local.weight.data, _data(local.bias)))
    elif split == (Shard(1),):
        model.set_submodule(name, SummedLinear(_linear(local.weight.data, None), local.bias))
    elif split != (Replicate(),):
        raise ModelError(f"{name} is laid out as {split}, which tensor parallelism cannot serve")


def _deal(name: str, module: Any, heads: Tensor, geometry: Geometry) -> None:
    """Keep the KV heads `heads` [H / N] of an attention module, and their query heads."""
    held = {parameter.split(".")[0] for parameter, _ in module.named_parameters()}
    if unknown := sorted(held - _DEALT):
        raise ModelError(
            f"{name} has {', '.join(unknown)}, and no rule says how heads on several devices share "
            "it: set tensor_parallel_size to 1"
        )
    for norm in ("q_norm", "k_norm"):
        weight = getattr(getattr(module, norm, None), "weight", None)
        if weight is not None and weight.numel() != geometry.head_dim:
            raise ModelError(
                f"{name}.{norm} normalises over all heads of a layer, which several devices share: "
                "set tensor_parallel_size to 1"
            )
    group = geometry.group_size
    queries = (heads[:, None] * group + torch.arange(group, device=heads.device)).flatten()
    rows = {
        part: (kept[:, None] * geometry.head_dim + _range(geometry.head_dim, kept)).flatten()
        for part, kept in (("q_proj", queries), ("k_proj", heads), ("v_proj", heads))
    }
    for part, kept in rows.items():
        whole = getattr(module, part)
        bias = _data(whole.bias)
        setattr(
            module, part, _linear(whole.weight.data[kept], None if bias is None else bias[kept])
        )
    whole = module.o_proj
    module.o_proj = SummedLinear(_linear(whole.weight.data[:, rows["q_proj"]], None), whole.bias)
    if getattr(module, "sinks", None) is not None:
        module.sinks = nn.Parameter(module.sinks.data[queries], requires_grad=False)


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _data(parameter: Any) -> Tensor | None:
    return None if parameter is None else parameter.data


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with `weight` [out, in] and `bias` [out]."""
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
