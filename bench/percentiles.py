"""Percentiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHARES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`p50`, `p90` and `p99` of `values`; none of no values."""
    return {f"p{share}": float(np.percentile(values, share)) for share in SHARES} if values else {}
