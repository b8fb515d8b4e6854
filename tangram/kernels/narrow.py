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
INT8_MAX = 127.0  # the same on both sides of 0
INT8_NAN = -128.0  # the one integer that is left
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
    """Keys or values [..., D] as a pool of `dtype` stores them.

    They are rounded to the nearest, ties to even. In 8 bits they are first bounded to the range.
    NaN stays NaN, so that whoever reads it is found. As integers, all of a vector that has NaN
    anywhere is `INT8_NAN`: kernels look at its first number.
    """
    if dtype is torch.int8:
        bounded = x.float().clamp(-INT8_MAX, INT8_MAX).round_()
        return bounded.masked_fill_(x.isnan().any(-1, keepdim=True), INT8_NAN).to(dtype)
    if dtype.itemsize == 1:  # torch turns values beyond the range of an FP8 dtype into NaN
        x = x.float().clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def as_numbers(entries: Tensor) -> Tensor:
    """What `entries` of a pool stand for: themselves, or float32 where they are integers."""
    if entries.dtype is not torch.int8:
        return entries
    numbers = entries.float()
    return numbers.masked_fill_(numbers == INT8_NAN, torch.nan)
