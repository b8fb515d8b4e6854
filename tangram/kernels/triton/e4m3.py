"""FP8 entries (E4M3) as 16 bits and back, on cards with and without instructions for it (Triton).

Integer arithmetic where there are none: exact, ties to even. Float16 holds every E4M3. To bfloat16
the instructions go through it, one element at a time and at a fraction of the rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.triton.tiles import INTERPRETED

_CONVERT = tl.constexpr("""
{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}
""")


def _calculate(codes: str, into: str) -> str:
    """PTX of `from_e4m3` for two codes, each the low byte of 16 bits."""
    # What is added to 0x7F carries into bit 7, which becomes the bits of a NaN.
    return f"""
    and.b32 size, {codes}, 0x007F007F;
    and.b32 sign, {codes}, 0x00800080;
    add.u32 carry, size, 0x00010001;
    and.b32 carry, carry, 0x00800080;
    shl.b32 size, size, 7;
    shl.b32 sign, sign, 8;
    or.b32 size, size, sign;
    mul.f16x2 size, size, factor;
    shl.b32 sign, carry, 8;
    sub.u32 sign, sign, carry;
    or.b32 {into}, size, sign;"""


_CALCULATE = tl.constexpr(
    "{"
    ".reg .b32 factor, codes, size, sign, carry;"
    "mov.b32 factor, 0x5C005C00;"
    "shr.b32 codes, $2, 8;" + _calculate("$2", "$0") + _calculate("codes", "$1") + "}"
)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Stored entries in `dtype`."""
    if x.dtype == tl.uint8:
        x = from_e4m3(x)
    elif dtype == tl.bfloat16:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def words(pool, PARTS: tl.constexpr):
    """`pool` as what is loaded: entries, or in two PARTS pairs of their FP8 elements.

    Pairs are copied and transposed as other 16 bits are; single bytes are not.
    """
    return pool if PARTS == 1 else pool.to(tl.pointer_type(tl.uint16))


@triton.jit
def widen_pairs(pair, pool, dtype: tl.constexpr):
    """The even and the odd elements, in `dtype`, of pairs uint16 that are loaded from `pool`."""
    if INTERPRETED:
        even = from_e4m3((pair & 0xFF).to(tl.uint8))
        odd = from_e4m3((pair >> 8).to(tl.uint8))
    else:
        # Of two pairs at a time: both even elements, then both odd ones.
        even, odd = tl.inline_asm_elementwise(
            asm=_CONVERT if pool.dtype.element_ty == tl.float8e4nv else _CALCULATE,
            constraints="=r,=r,r",
            args=[pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even.to(dtype), odd.to(dtype)


@triton.jit
def to_half(x):
    """bfloat16 `x` in float16: exact from 2^-14 to 65,504, which is the most."""
    wide = x.to(tl.float32)
    every: tl.constexpr = tl.PropagateNan.ALL
    return tl.clamp(wide, -65504.0, 65504.0, propagate_nan=every).to(tl.float16)


@triton.jit
def from_e4m3(code):
    """The float16 whose E4M3 is `code` uint8; NaN stays NaN.

    Exponents are biased by 7 instead of 15: read as a float16, its bits are too small by 256. That
    holds for subnormals, too.
    """
    size = (code & 0x7F).to(tl.int16)
    bits = (size << 7) | ((code & 0x80).to(tl.int16) << 8)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where(size == 0x7F, float("nan"), value)


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
