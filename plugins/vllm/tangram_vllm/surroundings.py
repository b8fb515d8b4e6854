"""What a layer's attention sees of the module of the model that it is part of."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tangram.errors import IntegrityError

if TYPE_CHECKING:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    from tangram.model.rotary import Rotary


class Surroundings:
    """The attention module of a model, `parent` of a layer of vLLM's `Attention`."""

    def __init__(self, parent: nn.Module) -> None:
        self._parent, self._form = parent, inspect.signature(parent.forward)
        self._hidden: Tensor | None = None

    @property
    def has_hidden(self) -> bool:
        """Whether the module is called with its hidden states, by this name."""
        return "hidden_states" in self._form.parameters

    def watch(self) -> None:
        """From now on, keep the input of each call until it is taken."""
        self._parent.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._hidden = self._form.bind(*given, **named).arguments["hidden_states"]

    def take_hidden(self) -> Tensor:
        """The input [T, hidden] of the call that goes on. Raises `IntegrityError` if unseen."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise IntegrityError(f"{type(self._parent).__name__} was called past its hooks")
        return hidden

    def find_rotary(self) -> Rotary | None:
        """The rotation of the module; None unless it turns halves, by positions in the text.

        vLLM has a table with a row for each position. A position beyond its end is turned by the
        last row, and then by the row of the positions that are left.
        """
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
        from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

        found = getattr(self._parent, "rotary_emb", None)
        if not isinstance(found, RotaryEmbeddingBase) or isinstance(found, MRotaryEmbedding):
            return None
        return _read_table(found) if found.is_neox_style else None


class Surrounded:
    """What has `surroundings` as soon as a model has it as the `impl` of one of its layers."""

    surroundings: Surroundings | None = None


def introduce(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Give the `impl` of `child`, which becomes part of `parent`, its surroundings.

    PyTorch calls this for every module that becomes part of another.
    """
    impl = getattr(child, "impl", None)
    if isinstance(impl, Surrounded):
        impl.surroundings = Surroundings(parent)


def _read_table(found: RotaryEmbeddingBase) -> Rotary:
    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        table = found.cos_sin_cache
        inside = positions.clamp(max=len(table) - 1)
        cos, sin = table[inside].float().chunk(2, dim=-1)
        # Row 0 turns by nothing, but has the factor that every row has.
        on = table[positions - inside].float() / table[0].float().chunk(2)[0].repeat(2)
        on_cos, on_sin = on.chunk(2, dim=-1)
        cos, sin = cos * on_cos - sin * on_sin, sin * on_cos + cos * on_sin
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return rotary
