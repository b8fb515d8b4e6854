"""Profiles of ratios that were not measured: what they are made of, and how near they come."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from bench.derived_profiles import measure_moved_pages
from tangram.compress.between import derive_profile, is_derivable
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile, ProfileOptions
from tangram.errors import ConfigError
from tests.core.host.test_profile import make

PAGES = {"page_tokens": 16, "heads_per_page": 4}


def test_between_two_ratios_shares_are_interpolated() -> None:
    low, high = make(seed=1, kv_retention=0.25), make(seed=2, kv_retention=0.5)
    other = make(seed=3, kv_retention=0.75)
    found = derive_profile([high, other, low], 0.3, **PAGES)
    shares = 0.8 * np.array(low.mean) + 0.2 * np.array(high.mean)
    np.testing.assert_allclose(found.mean, shares, atol=1e-5)
    expected = Profile.from_statistics(
        found.mean,
        found.std,
        ProfileOptions(low.model, low.layers, low.scorer, low.scope, 512),
        0.3,
        low.calibration,
    )
    assert found == expected, "its pages follow from its shares as a calibration's do"


@pytest.mark.parametrize(("ratio", "nearest"), [(0.1, 0.25), (0.9, 0.75)])
def test_beside_all_ratios_the_nearest_shares_are_allotted_anew(
    ratio: float, nearest: float
) -> None:
    known = {rho: make(seed=int(100 * rho), kv_retention=rho) for rho in (0.25, 0.5, 0.75)}
    found = derive_profile(list(known.values()), ratio, **PAGES)
    assert found.mean == known[nearest].mean
    assert found.realised_retention <= ratio
    assert derive_profile([known[nearest]], ratio, **PAGES) == found


def test_a_measured_ratio_gives_its_own_profile_in_the_pages_asked_for() -> None:
    known = [make(seed=1, kv_retention=0.25), make(seed=2, kv_retention=0.5)]
    assert derive_profile(known, 0.5, page_tokens=8, heads_per_page=2) == known[1].with_pages(8, 2)


def test_profiles_with_other_options_are_left_out() -> None:
    own, strange = make(seed=1, kv_retention=0.5), make(seed=2, kv_retention=0.25, sink_tokens=8)
    assert derive_profile([strange, own], 0.45, **PAGES).mean == own.mean


def test_an_unreachable_ratio_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"kv_retention is 0\.05.*smallest"):
        derive_profile([make(kv_retention=0.5, window_tokens=100)], 0.05, **PAGES)


def test_only_multiples_of_a_step_are_derived_so_they_are_few() -> None:
    assert is_derivable(0.3) and is_derivable(0.05) and is_derivable(0.95)
    for ratio in (0.33, 0.30000000000000004, 0.3 + 1e-12, 0.0, 1.0, -0.05, float("nan"), 1e300):
        assert not is_derivable(ratio), ratio


def test_shipped_profiles_are_near_those_derived_of_their_neighbours() -> None:
    """docs/calibration.md has the figures."""
    profiles = [Profile.load(path) for path in sorted(find_shipped_profiles().glob("smollm2.*"))]
    seen = 0
    for _, group in groupby(profiles, lambda one: (one.scorer.name, one.chunk_tokens)):
        known = {profile.kv_retention: profile for profile in group}
        found = derive_profile([known[0.25], known[0.75]], 0.5, **PAGES)
        assert measure_moved_pages(found, known[0.5]) < 0.08
        seen += 1
    assert seen == 8
