"""A profile derived for a ratio beside the one that a calibration measures there."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.derived_profiles import measure_moved_pages
from tangram.calibrate.measure import calibrate
from tangram.compress.between import derive_profile
from tangram.compress.profile import Profile, ProfileOptions
from tests.core.host.test_between import PAGES
from tests.core.host.test_profile import make


def calibrate_on_noise(ratios: list[float]) -> list[Profile]:
    """A calibration on random scores, of heads that need more and less."""
    profile = make()
    geometry: Any = type(
        "Shape", (), {"full_layers": (0, 2, 4), "kv_heads": 6, "max_positions": 4096}
    )
    need = np.linspace(-1, 1, 18).reshape(3, 6, 1)
    return calibrate(
        lambda sample: iter(
            [np.float32(need + np.random.default_rng(sample[0]).normal(size=(3, 6, 512)))]
        ),
        [[seed] * 512 for seed in range(4)],
        ProfileOptions(profile.model, geometry.full_layers, profile.scorer, "model", 512),
        ratios,
        max_positions=geometry.max_positions,
        source="random",
    )


def test_a_derived_profile_is_near_the_one_that_a_calibration_makes() -> None:
    low, between, high = calibrate_on_noise([0.25, 0.3, 0.5])
    found = derive_profile([low, high], 0.3, **PAGES)
    assert (
        measure_moved_pages(found, between)
        < 0.03
        < measure_moved_pages(derive_profile([high], 0.3, **PAGES), between)
    )
