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
# A profile's scale brings the largest magnitude to at most 448. So many of it bring it to 112: the
# least power of two that keeps it in the range of int8, since products with such a scale are exact.
_INT8_UNIT = 4.0


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """By what entries are divided before they are stored in `dtype`, for a profile's `scales`."""
    return scales * _INT8_UNIT if dtype is torch.int8 else scales


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
