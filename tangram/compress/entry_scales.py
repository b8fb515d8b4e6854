"""Scales of a cache of 8 bits: keys and values of a KV head are divided by them, then stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tangram.types import FP8_MAX, HeadScales

_BITS = 8  # files stay small


def choose_scales(largest: npt.ArrayLike) -> HeadScales:
    """The scales for keys and values of these `largest` magnitudes, [L, H, 2].

    Each brings the largest magnitude to the end of the range of E4M3, 448; 1 for a magnitude of 0.
    It is rounded up to `_BITS` binary digits. What each dtype makes of it is said in
    `kernels/narrow.py`.
    """
    given = np.asarray(largest, np.float64)
    mantissa, exponent = np.frexp(np.where(given > 0, given, FP8_MAX) / FP8_MAX)
    scales = np.ldexp(np.ceil(np.ldexp(mantissa, _BITS)), exponent - _BITS)
    return tuple(tuple((float(key), float(value)) for key, value in heads) for heads in scales)


def join_scales(scales: Iterable[HeadScales | None]) -> HeadScales | None:
    """The scales of a pool that several profiles share: the largest of each. None if all are."""
    known = [np.asarray(part) for part in scales if part is not None]
    if not known:
        return None
    return tuple(
        tuple((float(key), float(value)) for key, value in heads) for heads in np.max(known, axis=0)
    )
