"""E4M3 by integer arithmetic, for cards without the instructions: exact, ties to even (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tangram.kernels.card import Card


def address(pool: Tensor, card: Card) -> Tensor:
    """`pool` as the kernels read it on `card`: bytes if the card cannot convert FP8."""
    if pool.dtype == torch.float8_e4m3fn and not card.converts_fp8:
        return pool.view(torch.uint8)
    return pool


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Stored entries in `dtype`."""
    if x.dtype == tl.uint8:
        x = from_e4m3(x)
    return x.to(dtype)


@triton.jit
def from_e4m3(code):
    """The float16 whose E4M3 is `code` uint8; NaN stays NaN."""
    magnitude = (code & 0x7F).to(tl.int16)
    # Exponents are biased by 15 instead of 7; subnormals are eighths of the smallest one.
    large = ((magnitude << 7) + 0x2000).to(tl.float16, bitcast=True)
    small = magnitude.to(tl.float16) * 0.001953125
    value = tl.where(magnitude < 8, small, large)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def to_e4m3(x):
    """The E4M3 of float32 `x` within ±448, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    large = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 steps are as wide as those of a float32 at 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, large)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
