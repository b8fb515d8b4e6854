"""The forms of entries in host memory: as they are, in 8 bits, or in 4.

A chunk is rounded to what its form can hold when it is sealed. Packing its pages later loses
nothing, and they come back equal to the bit, however often they travel. Rounding depends on one
entry's key or value alone. All numbers of a form are exact in bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from tangram.types import FP8_MAX

FormName = Literal["fp8", "int4"]
GROUP = 32  # numbers of a key or value that share a step and an offset, unless D is no multiple
# Exponents of the finest scale and of the finest step: float16 is exact down to 2⁻²⁴.
_LOWEST_SCALE, _LOWEST_STEP = -15, -24
_MOST = 127  # steps from zero, which an int8 holds and bfloat16 has the digits for
_LEVELS = 15


class HostForm(Protocol):
    """How the numbers of keys and values lie in host memory; D is the last dimension of all."""

    def round(self, entries: Tensor) -> Tensor:
        """`entries` [..., D] rounded to what the form holds, in their dtype."""
        ...

    def pack(self, entries: Tensor) -> Tensor:
        """Rounded `entries` [n, ..., D] as int32 [n, words]."""
        ...

    def unpack(self, words: Tensor, like: Tensor) -> Tensor:
        """The pages that were packed into `words` int32 [n, words], shaped as those of `like`."""
        ...

    def page_bytes(self, vectors: int, dim: int) -> int:
        """Bytes of a page of `vectors` keys and values of `dim` numbers each."""
        ...


class Fp8Form:
    """E4M3 with a power of two for each key and value: a byte a number, and one for the power."""

    def round(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        numbers, exponent = self._split(entries)
        return (numbers.float() * _power(exponent)).to(entries.dtype)

    def pack(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        numbers, exponent = self._split(entries)
        return _join(numbers.view(torch.uint8), exponent.to(torch.int8).view(torch.uint8))

    def unpack(self, words: Tensor, like: Tensor) -> Tensor:
        """See `HostForm`."""
        shape = (len(words), *like.shape[1:])
        vectors = like[0].numel() // like.shape[-1]
        numbers, exponent = _cut(words, like[0].numel(), vectors)
        exponents = exponent.view(torch.int8).view(*shape[:-1], 1).int()
        wide = numbers.view(torch.float8_e4m3fn).view(shape).float()
        return (wide * _power(exponents)).to(like.dtype)

    def page_bytes(self, vectors: int, dim: int) -> int:
        """See `HostForm`."""
        return _fill_words(vectors * dim + vectors)

    @staticmethod
    def _split(entries: Tensor) -> tuple[Tensor, Tensor]:
        wide = entries.float()
        largest = wide.abs().amax(-1, keepdim=True)
        exponent = _exponent_of(largest / FP8_MAX, _LOWEST_SCALE)
        return (wide * _power(-exponent)).to(torch.float8_e4m3fn), exponent


class Int4Form:
    """Whole steps above an offset: 4 bits a number, and two bytes for `GROUP` of them.

    The step is the smallest power of two with which the group spans 15 steps and lies within 127
    steps of zero.
    """

    def round(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        steps, exponent = self._steps(entries)
        return (steps * _power(exponent)).view(entries.shape).to(entries.dtype)

    def pack(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        steps, exponent = self._steps(entries)
        offset = steps.amin(-1, keepdim=True)
        codes = (steps - offset).to(torch.uint8)
        halves = codes[..., ::2] | codes[..., 1::2] << 4
        parts = (part.to(torch.int8).view(torch.uint8) for part in (offset, exponent))
        return _join(halves, *parts)

    def unpack(self, words: Tensor, like: Tensor) -> Tensor:
        """See `HostForm`."""
        group = _group(like.shape[-1])
        groups = like[0].numel() // group
        halves, offset, exponent = _cut(words, like[0].numel() // 2, groups, groups)
        codes = torch.stack([halves & 15, halves >> 4], -1).view(len(words), groups, group)
        low, power = (part.view(torch.int8)[..., None] for part in (offset, exponent))
        wide = (codes.float() + low.float()) * _power(power.int())
        return wide.view(len(words), *like.shape[1:]).to(like.dtype)

    def page_bytes(self, vectors: int, dim: int) -> int:
        """See `HostForm`."""
        return _fill_words(vectors * dim // 2 + 2 * vectors * dim // _group(dim))

    @staticmethod
    def _steps(entries: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 [..., groups, group] of whole steps, and the exponents of their size."""
        dim = entries.shape[-1]
        wide = entries.float().unflatten(-1, (-1, _group(dim)))
        low, high = wide.aminmax(dim=-1, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs())
        size = torch.maximum((high - low) / _LEVELS, largest / _MOST)
        exponent = _exponent_of(size, _LOWEST_STEP)
        steps = (wide * _power(-exponent)).round()
        # Both ends may have been rounded outwards.
        wider = steps.amax(-1, keepdim=True) - steps.amin(-1, keepdim=True) > _LEVELS
        exponent = exponent + wider.int()
        return (wide * _power(-exponent)).round(), exponent


HOST_FORMS: Mapping[FormName, HostForm] = MappingProxyType({"fp8": Fp8Form(), "int4": Int4Form()})


def _exponent_of(size: Tensor, lowest: int) -> Tensor:
    """int32: the least e, but not below `lowest`, for which 2ᵉ is at least `size`."""
    mantissa, exponent = torch.frexp(size)
    return (exponent - (mantissa == 0.5).int()).clamp_(min=lowest)


def _power(exponent: Tensor) -> Tensor:
    """float32 2ᵉ, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def _group(dim: int) -> int:
    return GROUP if dim % GROUP == 0 else dim


def _fill_words(size: int) -> int:
    """The bytes of the 32-bit words that hold `size` bytes."""
    return -(-size // 4) * 4


def _join(*parts: Tensor) -> Tensor:
    """uint8 parts [n, ...] of each page side by side, as int32 [n, words]."""
    flat = torch.cat([part.flatten(1) for part in parts], 1)
    rest = _fill_words(flat.shape[1]) - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, rest)).view(torch.int32)


def _cut(words: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The first `sizes` bytes of each page's parts, uint8 [n, size]."""
    return words.view(torch.uint8)[:, : sum(sizes)].split(sizes, 1)
