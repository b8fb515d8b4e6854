"""The forms of entries in host memory: as they are, in 8 bits, or in 4.

A chunk is rounded to what its form can hold when it is sealed. Packing its pages later loses
nothing, and they come back equal to the bit, however often they travel. Rounding depends on one
entry's key or value alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from tangram.types import FP8_MAX

FormName = Literal["fp8", "int4"]
GROUP = 32  # numbers of a key or value that share their ends, unless D is no multiple
_LOWEST_SCALE = -15  # exponent: then float16 has the digits for all of E4M3
_MOST = 15.0  # the largest code


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
        exponent = _exponent_of(largest / FP8_MAX)
        return (wide * _power(-exponent)).to(torch.float8_e4m3fn), exponent


class Int4Form:
    """4 bits a number: one of 16 values at equal distances between the ends of its group.

    The ends are those of `GROUP` numbers of a key or value, in 16 bits. They come back as they are,
    so that a second rounding finds the same ends, and the same values between them.
    """

    def round(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        return self._values(*self._split(entries), entries.dtype).view(entries.shape)

    def pack(self, entries: Tensor) -> Tensor:
        """See `HostForm`."""
        ends, codes = self._split(entries)
        whole = codes.to(torch.uint8)
        halves = whole[..., ::2] | whole[..., 1::2] << 4
        return _join(halves, ends.view(torch.uint8))

    def unpack(self, words: Tensor, like: Tensor) -> Tensor:
        """See `HostForm`."""
        group = _group(like.shape[-1])
        groups = like[0].numel() // group
        halves, ends = _cut(words, like[0].numel() // 2, 4 * groups)
        codes = torch.stack([halves & 15, halves >> 4], -1).view(len(words), groups, group)
        both = ends.contiguous().view(_narrow(like.dtype)).view(len(words), groups, 2)
        return self._values(both, codes.float(), like.dtype).view(len(words), *like.shape[1:])

    def page_bytes(self, vectors: int, dim: int) -> int:
        """See `HostForm`."""
        return _fill_words(vectors * dim // 2 + 4 * vectors * dim // _group(dim))

    @staticmethod
    def _split(entries: Tensor) -> tuple[Tensor, Tensor]:
        """The ends [..., groups, 2] in 16 bits, and the codes [..., groups, group] in float32."""
        wide = torch.unflatten(entries.float(), -1, (-1, _group(entries.shape[-1])))
        low, high = wide.aminmax(dim=-1, keepdim=True)
        ends = torch.cat([low, high], -1).to(_narrow(entries.dtype))
        begin, end = torch.split(ends.float(), 1, -1)
        a_code = torch.where(end > begin, _MOST / (end - begin), 0.0)
        codes = ((wide - begin) * a_code).round().clamp(0, _MOST)
        # A number at an end stays there, though the end has been rounded.
        codes = torch.where(wide == high, _MOST, codes)
        return ends, torch.where(wide == low, 0.0, codes)

    @staticmethod
    def _values(ends: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        begin, end = torch.split(ends.float(), 1, -1)
        between = begin + (end - begin) * (codes / _MOST)
        return torch.where(codes == _MOST, end, between).to(dtype)


HOST_FORMS: Mapping[FormName, HostForm] = MappingProxyType({"fp8": Fp8Form(), "int4": Int4Form()})


def _exponent_of(size: Tensor) -> Tensor:
    """int32: the least e, but not below the lowest, for which 2ᵉ is at least `size`."""
    mantissa, exponent = torch.frexp(size)
    return (exponent - (mantissa == 0.5).int()).clamp_(min=_LOWEST_SCALE)


def _power(exponent: Tensor) -> Tensor:
    """float32 2ᵉ, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype of the ends of groups of `dtype`."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


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
    return torch.split(words.view(torch.uint8)[:, : sum(sizes)], list(sizes), 1)
