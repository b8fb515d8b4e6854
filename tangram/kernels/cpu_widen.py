"""Float32 of narrow pool entries. Of dtypes that Numba does not know it gets the bits, unsigned."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from tangram.numba_cache import compile_kept

INT8_NAN = -128  # that of `narrow`


@compile_kept()
def widen_bfloat16(block, begin, end, wide):  # type: ignore[no-untyped-def]
    """wide[begin:end] = block[begin:end], uint16 bits of bfloat16."""
    bits = wide.view(np.uint32)
    for t in range(begin, end):
        for d in range(block.shape[1]):
            bits[t, d] = np.uint32(block[t, d]) << np.uint32(16)


@compile_kept()
def widen_e4m3(block, begin, end, wide):  # type: ignore[no-untyped-def]
    """wide[begin:end] = block[begin:end], uint8 bits of E4M3, whose exponents are 120 lower."""
    bits = wide.view(np.uint32)
    for t in range(begin, end):
        for d in range(block.shape[1]):
            code = np.uint32(block[t, d])
            size = code & np.uint32(0x7F)
            bits[t, d] = (code & np.uint32(0x80)) << np.uint32(24) | size << np.uint32(20)
            wide[t, d] *= np.float32(2.0**120)
            if size == np.uint32(0x7F):
                wide[t, d] = np.nan


@compile_kept()
def widen_int8(block, begin, end, wide):  # type: ignore[no-untyped-def]
    """wide[begin:end] = block[begin:end], int8; vectors of −128 begin with NaN."""
    for t in range(begin, end):
        for d in range(block.shape[1]):
            wide[t, d] = block[t, d]
        if block[t, 0] == INT8_NAN:
            wide[t, 0] = np.nan


# By the name of a dtype, which NumPy and Numba share.
_CONVERSIONS = {"uint16": widen_bfloat16, "uint8": widen_e4m3, "int8": widen_int8}


def widen(block: Any, begin: int, end: int, wide: Any) -> Any:
    """A float32 array [P, D] whose entries [begin, end) are those of `block` [P, D].

    `block` itself if it is float32; else `wide`, to which they are written.
    """
    if block.dtype == np.float32:
        return block
    _CONVERSIONS[str(block.dtype)](block, begin, end, wide)
    return wide


@overload(widen)
def _compile_widen(block, begin, end, wide):  # type: ignore[no-untyped-def]
    """`widen` for the dtype of `block`, which Numba knows when it compiles.

    Numba compares the parameters of both functions, annotations included.
    """
    if block.dtype == types.float32:
        return lambda block, begin, end, wide: block
    convert = _CONVERSIONS[str(block.dtype)]

    def widen_bits(block, begin, end, wide):  # type: ignore[no-untyped-def]
        convert(block, begin, end, wide)
        return wide

    return widen_bits


def is_nan(blocks: Any, block: int, part: int, entry: int) -> bool:
    """Whether vector `part` of an entry of `blocks` [n, S, P, D] is NaN as integers are.

    Other dtypes have NaN as numbers, which need no look.
    """
    return blocks.dtype == np.int8 and bool(blocks[block, part, entry, 0] == INT8_NAN)


@overload(is_nan, inline="always")
def _compile_is_nan(blocks, block, part, entry):  # type: ignore[no-untyped-def]
    if blocks.dtype != types.int8:
        return lambda blocks, block, part, entry: False
    return lambda blocks, block, part, entry: blocks[block, part, entry, 0] == INT8_NAN
