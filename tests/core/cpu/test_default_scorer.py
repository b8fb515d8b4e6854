"""Which scorer serves where none is named: that of the profiles, of the gate, or the best that the
weights have.

And among which heads entries compete by its scores.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.compress.scorers import SCORERS, choose_scorer, read_profiles
from tangram.compress.scorers.gate import find_shipped_gates
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup import profiles
from tangram.engine.setup.build import build_engine, engine_of
from tangram.errors import ConfigError, ProfileError
from tangram.model.load import LoadedModel
from tests.mentions import mentioning

KEYDIFF = str(find_shipped_profiles() / "smollm2.keydiff.model.c512.r0.5.json")
GATE = str(find_shipped_gates() / "smollm2.fastkvzip.safetensors")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrations are kept: nothing is there."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    return tmp_path


def serve(loaded: LoadedModel, **options: object) -> Engine:
    return engine_of(EngineConfig(kv_cache_gib=0.2, max_model_len=1024, **options), loaded)  # type: ignore[arg-type]


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.75])
def test_the_embedded_model_is_served_by_its_gate_and_never_calibrated(
    loaded: LoadedModel, retention: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "calibrate_model", None)
    engine = serve(loaded, kv_retention=retention)
    profile = Profile.load(
        find_shipped_profiles() / f"smollm2.fastkvzip.model.c512.r{retention:g}.json"
    )
    assert engine.config.scorer == "fastkvzip"
    assert engine.admission.retentions[0].fingerprint == profile.fingerprint()


def test_weights_without_a_gate_are_served_by_keydiff(
    folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        str(folder),
        load_format="dummy",
        chunk_tokens=32,
        page_tokens=8,
        max_num_seqs=4,
        kv_cache_gib=0.01,
        max_num_batched_tokens=128,
    )
    with caplog.at_level("INFO", "tangram"):
        engine = build_engine(config)
    assert engine.config.scorer == "keydiff"
    assert "(keydiff, scope model)" in caplog.text
    assert [".keydiff." in path.name for path in empty_cache.glob("weights/*/profiles/*.json")] == [
        True
    ]


def test_a_profile_says_its_scorer(loaded: LoadedModel) -> None:
    assert serve(loaded, profile=(KEYDIFF,)).config.scorer == "keydiff"


def test_a_scorer_that_is_named_is_taken(loaded: LoadedModel) -> None:
    assert serve(loaded, scorer="keydiff").config.scorer == "keydiff"
    with pytest.raises(ProfileError, match=mentioning("scorer 'keydiff' 'fastkvzip'")):
        serve(loaded, scorer="fastkvzip", profile=(KEYDIFF,))


def test_a_gate_that_is_given_is_used(loaded: LoadedModel) -> None:
    assert choose_scorer(EngineConfig(gate=GATE), None, {}).scorer == "fastkvzip"
    assert choose_scorer(EngineConfig(), None, {}).scorer == "keydiff"


def test_profiles_of_several_scorers_are_served_and_the_default_ratio_says_which_first(
    loaded: LoadedModel,
) -> None:
    gated = KEYDIFF.replace("keydiff", "fastkvzip").replace("r0.5", "r0.25")
    for ratio, scorer in ((0.5, "keydiff"), (0.25, "fastkvzip"), (1.0, "keydiff")):
        engine = serve(loaded, profile=(KEYDIFF, gated), kv_retention=ratio)
        assert engine.config.scorer == scorer
        ways = {(entry.kv_retention, entry.scorer) for entry in engine.admission.retentions}
        assert ways == {(0.5, "keydiff"), (0.25, "fastkvzip"), (1.0, None)}
    with pytest.raises(ConfigError, match=mentioning("gate keydiff")):
        serve(loaded, profile=(KEYDIFF,), gate=GATE)
    assert serve(loaded, profile=(KEYDIFF, gated), gate=GATE).config.scorer == "keydiff"


def test_heads_of_the_whole_model_compete_unless_scores_mean_nothing_across_layers() -> None:
    scopes = {name: choose_scorer(EngineConfig(scorer=name), None, {}).scope for name in SCORERS}
    assert scopes.pop("tova") == "layer"
    assert set(scopes.values()) == {"model"}
    assert choose_scorer(EngineConfig(scorer="tova", scope="model"), None, {}).scope == "model"


def test_a_profile_says_which_heads_compete() -> None:
    published = [
        f"llama-3.1-8b-instruct.keydiff.{scope}.c512.r0.5.json" for scope in ("layer", "model")
    ]
    files = tuple(str(find_shipped_profiles() / name) for name in published)
    one, both = EngineConfig(profile=files[:1]), EngineConfig(profile=files)
    assert choose_scorer(one, None, read_profiles(one)) == ("keydiff", "layer")
    with pytest.raises(ProfileError, match=mentioning("keydiff scopes layer, model)")):
        choose_scorer(both, None, read_profiles(both))


def test_a_calibration_is_for_the_scorer_that_will_serve(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "profile.json"
    options = ["--load-format", "dummy", "--chunk-tokens", "32", "--samples", "2", "-o", str(made)]
    result = CliRunner().invoke(app, ["calibrate", str(folder), *options])
    assert result.exit_code == 0, result.output
    assert Profile.load(made).scorer.name == "keydiff"
