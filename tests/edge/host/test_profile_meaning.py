"""What `tangram calibrate` says of a profile in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tangram.cli.profile_meaning import meaning, serve_line
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.compress.provenance import RankStability
from tangram.config import EngineConfig

SHIPPED = find_shipped_profiles() / "smollm2.fastkvzip.model.c512.r0.5.json"


@pytest.mark.parametrize(
    ("stability", "said"),
    [
        (RankStability(0.9, 0.7), "0.90, at least 0.70: the budgets also suit other texts"),
        (RankStability(0.6, 0.1), "a compromise. Calibrate on texts like yours (--data)."),
        (RankStability(0.3, -0.2), "suit few of them"),
        (None, "not known"),
    ],
)
def test_a_profile_is_told_in_words(stability: RankStability | None, said: str) -> None:
    profile = Profile.load(SHIPPED)
    told = profile.model_copy(
        update={"calibration": replace(profile.calibration, rank_stability=stability)}
    )
    kept, agreed = meaning(told)
    assert f"at most {profile.realised_retention:.1%} of its entries" in kept
    assert said in agreed


def test_the_serve_line_names_what_the_profile_depends_on() -> None:
    plain = serve_line(EngineConfig(), Path("p.json"))
    assert plain == "tangram serve smollm2 --kv-retention 0.5 --profile p.json"
    config = EngineConfig(
        model="a model",
        kv_retention=0.3,
        chunk_tokens=256,
        gate="g.safetensors",
        scorer="fastkvzip",
    )
    assert serve_line(config, Path("my profile.json")) == (
        "tangram serve 'a model' --kv-retention 0.3 --profile 'my profile.json' --chunk-tokens "
        "256 --gate g.safetensors"
    )
