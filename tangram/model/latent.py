"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token has one latent and one rotary key for all heads of a layer, and these are what pages hold.
Prefill expands them into the keys and values of the heads, as Transformers does. Decode takes the
expansion into the query and the output instead: q · (W k) = (Wᵀ q) · k. So the latents are the one
key of all query heads, and their values are its first elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import ModelError
from tangram.model.modules import derive, remake, replace_modules

# What Transformers' modules with latents have: the expansion, and the linear map that it applies.
_EXPANSION, _MAP = "expand_kv", "kv_b_proj"
OURS = "tangram"  # what the names of our implementations of attention begin with


def pass_latents(model: PreTrainedModel) -> None:
    """Let modules with latents pass these to our implementations of attention, not expanded.

    They get them as keys [1, 1, T, rank], and their rotary keys as values [1, 1, T, rotary]. Every
    other implementation gets what Transformers gives it. Raises `ModelError` if a module's map is
    not a plain matrix.
    """

    def make(name: str, module: nn.Module) -> nn.Module:
        found = getattr(module, _MAP, None)
        if type(found) is not nn.Linear or type(found.weight) is not nn.Parameter:
            raise ModelError(
                f"{type(model).__name__}: {name}.{_MAP} is {type(found).__name__}, not a plain "
                "matrix that decode can absorb: leave it out of the quantisation"
            )
        return remake(module, _passing)

    replace_modules(
        model, lambda _, part: has_latents(part) and not isinstance(part, _Passing), make
    )


def has_latents(module: nn.Module) -> bool:
    """Whether it is an attention module with latents."""
    return hasattr(module, _EXPANSION)


def is_absorbed(name: str) -> bool:
    """Whether the map `name` of a model is one that decode absorbs: its weights stay a matrix."""
    return name.rpartition(".")[2] == _MAP


class _Passing:
    """What modules with latents are besides, once these pass."""

    config: Any

    def expand_kv(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [1, 1, n, rank] and rotary keys [1, 1, n, rotary], as they are or expanded."""
        if self.config._attn_implementation.startswith(OURS):
            return latents, rotary
        return self.expand(latents, rotary)

    def expand(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """What Transformers' own module makes of them."""
        model: Any = super()
        expanded: tuple[Tensor, Tensor] = model.expand_kv(latents, rotary)
        return expanded


@cache
def _passing(kind: type[Any]) -> type[nn.Module]:
    return derive(kind, _Passing)


@dataclass(frozen=True)
class LatentHeads:
    """The query heads of one module over its latents.

    `up` [Q, key + value, rank] expands a latent into the keys, without rotary part, and the values
    of the heads. `expansion` does the same in the model's own code.
    """

    up: Tensor
    value_dim: int
    expansion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The elements of a latent."""
        return self.up.shape[2]

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, Q, D'] of the heads → queries [T, Q, rank + rotary] of the latents."""
        plain = self.up.shape[1] - self.value_dim
        turned = torch.bmm(q[..., :plain].transpose(0, 1), self.up[:, :plain])
        return torch.cat([turned.transpose(0, 1), q[..., plain:]], dim=-1)

    def read_values(self, out: Tensor) -> Tensor:
        """Means of latents [T, Q, rank] → means of the heads' values [T, Q, V]."""
        down = self.up[:, -self.value_dim :].transpose(1, 2)
        return torch.bmm(out.transpose(0, 1), down).transpose(0, 1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys [n, rank + rotary] → keys [Q, n, D'] and values [Q, n, V]."""
        parts = torch.split(latents[None, None], [self.rank, latents.shape[1] - self.rank], dim=-1)
        keys, values = self.expansion(*parts)
        return keys[0], values[0]


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """The heads of an attention module whose latents `pass_latents` lets pass, or None."""
    if not isinstance(module, _Passing):
        return None
    heads: Any = module
    up = heads.kv_b_proj.weight.view(heads.num_heads, -1, heads.kv_lora_rank)
    return LatentHeads(up, int(heads.v_head_dim), heads.expand)


def join_entries(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [T, 1, rank + rotary] of latents and rotary keys, and their values [T, 1, rank]."""
    keys = torch.cat([latents, rotary], dim=-1)
    return keys, keys[..., : latents.shape[-1]]


def output_like(module: nn.Module, q: Tensor) -> Tensor:
    """An empty output of attention for q [T, Q, D'] of a module: [T, Q, V]."""
    heads = latent_heads(module)
    dim = q.shape[-1] if heads is None else heads.value_dim
    return torch.empty((*q.shape[:-1], dim), dtype=q.dtype, device=q.device)
