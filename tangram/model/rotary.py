"""The model's rotary embedding for scorers: half-rotation, checked against the model's own code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tangram.compress.scorers.rotation import rotate
from tangram.errors import ModelError

# int64 positions [n] → (cos, sin), each float32 [n, D_rot]; see `ChunkView.rotary`.
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


def model_rotary(model: PreTrainedModel, head_dim: int) -> Rotary:
    """The rotary embedding of the model's full-attention layers; heads have `head_dim` dimensions.

    Dimension i must rotate with i + D_rot/2. Raises `ModelError` if the model rotates other pairs
    (GLM and Cohere interleave) or has no rotation: scores would be silently wrong.
    """
    name = type(model).__name__
    turn = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    embed = _embedding(model)
    if turn is None or embed is None:
        raise ModelError(
            f"{name} has no rotary embedding that a scorer could undo: choose another scorer"
        )
    x = torch.randn(1, 1, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(model.device)
    positions = torch.tensor([3, 1000], device=model.device)
    cos, sin = embed(positions)
    expected = turn(x, x, cos[None], sin[None])[0]
    # GPT-OSS gives each angle once; other models give it twice, once for each half.
    for rotary in (embed, _twice(embed)):
        cos, sin = rotary(positions)
        if cos.shape[-1] <= head_dim and torch.allclose(rotate(x, cos, sin), expected, atol=1e-5):
            return rotary
    raise ModelError(
        f"{name} does not rotate halves: this scorer cannot undo its rotation, choose another one"
    )


def _embedding(model: PreTrainedModel) -> Rotary | None:
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if not hasattr(decoder, "rotary_emb"):
        return None
    config = model.config.get_text_config()
    per_type = "full_attention" in (getattr(config, "rope_parameters", None) or {})
    options = {"layer_type": "full_attention"} if per_type else {}
    like = torch.empty(0, dtype=torch.float32, device=model.device)

    def embed(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = decoder.rotary_emb(like, positions[None], **options)
        return cos[0], sin[0]

    return embed


def _twice(embed: Rotary) -> Rotary:
    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = embed(positions)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return rotary
