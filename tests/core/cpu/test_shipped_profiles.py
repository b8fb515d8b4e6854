"""The shipped profiles were made for the scorers as they are today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer


@pytest.mark.parametrize(
    "path", sorted(find_shipped_profiles().glob("*.json")), ids=lambda path: path.stem
)
def test_a_shipped_profile_names_its_scorers_parameters(path: Path) -> None:
    profile = Profile.load(path)
    assert (
        dict(profile.scorer.parameters)
        == make_scorer(profile.scorer.name, model=profile.model).parameters()
    )
