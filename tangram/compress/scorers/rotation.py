"""Rotary position embedding in the half-rotation convention and its inverse; partial and scaled."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D_rot dimensions of `x` [..., n, D] by `cos`, `sin`; float32.

    These are [n, D_rot] or [1, D_rot].
    """
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, in the same shapes.

    YaRN multiplies cos and sin by a factor f, so the inverse is the reverse rotation over f² = cos²
    + sin².
    """
    norm = cos * cos + sin * sin
    return rotate(x, cos / norm, -sin / norm)
