"""KV caches of 8 bits a number: their dtypes, and how keys and values become such numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tangram.types import FP8_MAX

# By the values of `kv_cache_dtype`.
NARROW: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
)
INT8_MAX = 127.0  # −128 is not used: the range is the same on both sides of 0
_STEPS = 1 << 8  # of a mantissa: such a scale is exact in bfloat16


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """By what entries are divided before they are stored in `dtype`, for a profile's `scales`.

    These bring largest magnitudes to the end of E4M3. It has exponents, so it rounds no worse with
    the next power of two, and products with one are exact. Integers need all of their range: the
    results bring the magnitudes to between 125 and 127.
    """
    if dtype is torch.int8:
        mantissa, exponent = torch.frexp(scales * (FP8_MAX / INT8_MAX))
        return torch.ldexp(torch.ceil(mantissa * _STEPS) / _STEPS, exponent)
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def as_entries(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values, of any shape, as a pool of `dtype` stores them.

    They are rounded to the nearest, ties to even. In 8 bits they are first bounded to the range. As
    an integer NaN becomes 0, which hides no error: the pass that computed it has NaN in its logits.
    """
    if dtype is torch.int8:
        return torch.nan_to_num(x.float(), 0.0).clamp_(-INT8_MAX, INT8_MAX).round_().to(dtype)
    if dtype.itemsize == 1:  # torch turns values beyond the range of an FP8 dtype into NaN
        x = x.float().clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)
