"""Profiles of ratios that were not measured, derived from the shares of those that were.

Between two measured ratios a head's share is interpolated. Below the least and above the largest
the shares of that profile are allotted anew, as Tangram's authors do for all ratios.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.compress.profile import Profile

STEP = 0.05  # derived ratios are its multiples: a server has at most so many layouts


def is_derivable(kv_retention: float) -> bool:
    """Whether a profile may be derived for this ratio: a multiple of `STEP` below 1."""
    if not 0 < kv_retention < 1:
        return False
    return kv_retention == round(round(kv_retention / STEP) * STEP, 2)


def derive_profile(
    profiles: Sequence[Profile], kv_retention: float, *, page_tokens: int, heads_per_page: int
) -> Profile:
    """The profile for ρ = `kv_retention` by the shares of `profiles`, of one scorer and model.

    It depends on its arguments alone, and is that of ρ, cut to pages, if there is one. Profiles
    with other options than the nearest one are left out. Raises `ConfigError` if ρ cannot be met.

    Example: a head keeps 0.2 at ρ 0.25 and 0.6 at ρ 0.5; at ρ 0.3 it should keep 0.28.
    """
    ordered = sorted(profiles, key=lambda profile: profile.kv_retention)
    nearest = min(ordered, key=lambda profile: abs(profile.kv_retention - kv_retention))
    alike = [profile for profile in ordered if profile.has_options_of(nearest)]
    below = [profile for profile in alike if profile.kv_retention <= kv_retention]
    above = [profile for profile in alike if profile.kv_retention > kv_retention]
    low = below[-1] if below else above[0]
    high = above[0] if above else below[-1]
    span = high.kv_retention - low.kv_retention
    part = (kv_retention - low.kv_retention) / span if span else 0.0
    mean, std = (
        (1 - part) * np.asarray(lower) + part * np.asarray(upper)
        for lower, upper in ((low.mean, high.mean), (low.std, high.std))
    )
    return nearest.with_statistics(
        mean, std, kv_retention=kv_retention, page_tokens=page_tokens, heads_per_page=heads_per_page
    )
