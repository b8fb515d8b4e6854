"""Scales of an FP8 cache: keys and values of a KV head are divided by them and then stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tangram.types import FP8_MAX, HeadScales


def choose_scales(largest: npt.ArrayLike) -> HeadScales:
    """The scales for keys and values of these `largest` magnitudes, [L, H, 2].

    Each is the smallest power of two that brings the largest magnitude into the range of E4M3; 1
    for a magnitude of 0. E4M3 has exponents, so a scale between two powers would round no better.
    A query times a power of two is exact. Example: 3.0 → 2⁻⁷, since 3.0 · 2⁷ = 384 ≤ 448.
    """
    given = np.asarray(largest, np.float64)
    exponents = np.ceil(np.log2(np.where(given > 0, given, FP8_MAX) / FP8_MAX))
    return tuple(
        tuple((float(key), float(value)) for key, value in heads) for heads in np.exp2(exponents)
    )


def join_scales(scales: Iterable[HeadScales | None]) -> HeadScales | None:
    """The scales of a pool that several profiles share: the largest of each. None if all are."""
    known = [np.asarray(own) for own in scales if own is not None]
    if not known:
        return None
    return tuple(
        tuple((float(key), float(value)) for key, value in heads) for heads in np.max(known, axis=0)
    )
