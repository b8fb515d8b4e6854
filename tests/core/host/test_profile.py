"""A profile is a promise in a file: it survives the disk, is refused when damaged, and fits one
model only.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.compress.document import digest
from tangram.compress.entry_scales import choose_scales, join_scales
from tangram.compress.library import find_profile
from tangram.compress.profile import (
    Calibration,
    ModelFingerprint,
    Profile,
    ProfileOptions,
    RankStability,
    ScorerSpec,
)
from tangram.errors import ConfigError, ProfileError
from tangram.types import Geometry
from tests.mentions import mentioning

MODEL = ModelFingerprint("acme/tiny", "llama", 5, 6, 12, 64, 1000, "ab" * 32)
OPTIONS: dict[str, Any] = {
    "scorer": "keydiff",
    "scope": "model",
    "kv_retention": 0.5,
    "chunk_tokens": 512,
}


def make(seed: int = 0, **changes: Any) -> Profile:
    rng = np.random.default_rng(seed)
    arguments: dict[str, Any] = {
        "mean": rng.random((3, 6)) ** 3,
        "std": rng.random((3, 6)) * 0.1,
        "kv_retention": 0.5,
        "calibration": Calibration(50, "calibration texts", 100_000, RankStability(0.9, 0.7)),
    }
    arguments |= {name: changes.pop(name) for name in arguments if name in changes}
    scorer = ScorerSpec("keydiff", {"epsilon": 0.01})
    options = replace(ProfileOptions(MODEL, [0, 2, 4], scorer, "model", 512), **changes)
    return Profile.from_statistics(options=options, **arguments)


@given(
    seed=st.integers(0, 1000),
    retention=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9]),
    shape=st.sampled_from([(16, 4), (8, 1), (32, 6), (16, 5)]),
    grouping=st.sampled_from(["model", "layer"]),
)
@settings(max_examples=40, deadline=None)
def test_the_layout_built_from_a_profile_occupies_at_most_rho(
    seed: int, retention: float, shape: tuple[int, int], grouping: str
) -> None:
    """Checked in the cache's own terms: pages of a sealed chunk against the entries the
    chunk has.
    """
    profile = make(
        seed,
        kv_retention=retention,
        page_tokens=shape[0],
        heads_per_page=shape[1],
        grouping=grouping,
    )
    geometry = Geometry(5, 6, 12, 64, 1000, 4096, (None, 64, None, 64, None))
    layout = Layout.build(
        geometry,
        chunk_tokens=512,
        page_tokens=shape[0],
        heads_per_page=shape[1],
        max_tokens=4096,
        groups=profile.groups,
        sealed_pages=profile.sealed_pages,
    )
    occupied = sum(profile.sealed_pages) * shape[0] * shape[1]
    assert occupied <= retention * 18 * 512
    assert profile.realised_retention == pytest.approx(occupied / (18 * 512))
    protected = profile.sink_tokens + profile.window_tokens
    assert (layout.head_kept_tokens[[0, 2, 4]] >= protected).all()


def test_a_group_is_sized_by_its_deepest_member_and_alpha_widens_it() -> None:
    mean = np.full((3, 6), 0.1)
    mean[1, 3], unsure = 0.4, np.zeros((3, 6))
    profile = make(mean=mean, std=unsure)
    deepest = [2, 3]
    assert deepest in [list(head) for head in profile.groups[0]]
    assert profile.sealed_pages[0] > profile.sealed_pages[1]
    unsure[0, 0] = 0.2
    widened = make(mean=mean, std=unsure, alpha=2.0)
    assert (0, 0) in widened.groups[0], "alpha 2 and std 0.2 make 0.1 the largest budget"
    assert (0, 0) not in make(mean=mean, std=unsure).groups[0][:1]


def test_window_defaults_to_a_64th_of_the_chunk_and_is_always_paid_for() -> None:
    profile = make(chunk_tokens=2048, mean=np.eye(3, 6), std=np.zeros((3, 6)))
    assert (profile.sink_tokens, profile.window_tokens) == (4, 32)
    assert min(profile.sealed_pages) >= 3  # 36 positions, 16 a page


@given(st.integers(0, 200))
@settings(max_examples=10, deadline=None)
def test_a_saved_profile_comes_back_the_same_and_derives_the_same_counts(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("profiles") / "one.json"
    profile = make(seed)
    profile.save(path)
    loaded = Profile.load(path)
    assert loaded == profile
    assert loaded.fingerprint() == profile.fingerprint()
    assert loaded.with_pages(16, 4) == profile
    assert [entry.name for entry in path.parent.iterdir()] == ["one.json"], (
        "a partial file was left behind"
    )


def test_a_file_of_version_1_has_no_scales(tmp_path: Path) -> None:
    path, profile = tmp_path / "old.json", make()
    content = profile.model_dump(mode="json") | {"format_version": 1}
    del content["scales"]
    path.write_text(json.dumps(content | {"checksum": digest(content)}))
    assert Profile.load(path) == profile and profile.scales is None


def test_scales_survive_the_file_and_other_page_shapes_and_are_no_part_of_prefix_keys(
    tmp_path: Path,
) -> None:
    largest = np.random.default_rng(0).lognormal(0.0, 4.0, (5, 6, 2))
    profile = make().with_scales(choose_scales(largest))
    profile.save(tmp_path / "one.json")
    found = Profile.load(tmp_path / "one.json").with_pages(8, 6)
    assert found.scales == choose_scales(largest) == profile.scales
    assert profile.fingerprint() == make().fingerprint()


def test_the_largest_magnitude_lies_at_the_end_of_e4m3() -> None:
    largest = np.random.default_rng(0).lognormal(0.0, 4.0, (5, 6, 2))
    largest[0, 0] = 0.0, 448.0
    stored = largest / np.asarray(choose_scales(largest))
    assert stored.max() == 448.0 and (stored[stored > 0] > 444.0).all()
    assert choose_scales(largest)[0][0] == (1.0, 1.0)


def test_profiles_served_together_share_the_largest_scales() -> None:
    one, other = (
        choose_scales(np.random.default_rng(seed).lognormal(0.0, 4.0, (5, 6, 2)))
        for seed in range(2)
    )
    joint = join_scales([None, one, other])
    assert np.array_equal(np.asarray(joint), np.maximum(one, other))
    assert join_scales([None, one]) == one and join_scales([None]) is None


def test_other_page_shapes_keep_the_statistics_and_the_promise() -> None:
    profile = make()
    other = profile.with_pages(32, 6)
    assert (other.mean, other.std, other.calibration) == (
        profile.mean,
        profile.std,
        profile.calibration,
    )
    assert (other.page_tokens, other.heads_per_page, len(other.groups)) == (32, 6, 3)
    assert other.realised_retention <= 0.5
    with pytest.raises(ConfigError, match=mentioning("chunk_tokens 512 page_tokens 48")):
        profile.with_pages(48, 4)


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format_version": 3}, "format_version 3"),
        ({"kv_retention": 0.6}, "checksum"),
        ({"checksum": None}, "checksum"),
        ({"kv_retention": 1.5}, "kv_retention 1.5 1"),
        ({"kv_retention": "0.5"}, "kv_retention '0.5' number"),
        ({"scope": "row"}, "scope 'row'"),
        ({"surprise": 1}, "surprise"),
        ({"mean": [[0.5] * 6] * 2}, "mean"),
        ({"std": [[0.5] * 5] * 3}, "std"),
        ({"mean": [[7.0] * 6] * 3}, "mean.0.0 7.0 1"),
        ({"layers": [0, 2, 9]}, "layers"),
        ({"layers": []}, "layers"),
        ({"groups": [[[0, 0]]]}, "groups"),
        ({"sealed_pages": [1, 2]}, "sealed_pages"),
        ({"sealed_pages": [33, 1, 1, 1, 1]}, "sealed_pages"),
        ({"sealed_pages": [32, 32, 32, 32, 32]}, "realised_retention"),
        ({"page_tokens": 48}, "page_tokens"),
        ({"scales": [[[1.0, 1.0]] * 6] * 4}, "scales [5 layers][6 heads]"),
        ({"scales": [[[1.0, 1.0]] * 5] * 5}, "scales [5 layers][6 heads]"),
        ({"scales": [[[1.0, 0.0]] * 6] * 5}, "scales.0.0.1 0.0 0"),
        ({"scorer": {"parameters": {}}}, "scorer.name"),
        ({"model": {"name": "x"}}, "model.architecture"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = tmp_path / "one.json"
    make().save(path)
    edit(path, **changes)
    with pytest.raises(ProfileError, match=mentioning(f"{path} {named}")):
        Profile.load(path)


@pytest.mark.parametrize("missing", sorted(set(Profile.model_fields) - {"format_version"}))
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "one.json"
    make().save(path)
    content = json.loads(path.read_text())
    del content[missing]
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=mentioning(f"{missing} required")):
        Profile.load(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not valid JSON"),
        ("[1]", "JSON object"),
        ('{"format_version": 1, "alpha": NaN}', "NaN"),
        ('{"format_version": 1, "alpha": -Infinity}', "Infinity"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not valid JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(
    tmp_path: Path, text: str | bytes, named: str
) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError, match=named):
        Profile.load(path)


def test_an_overflowing_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    make().save(path)
    path.write_text(path.read_text().replace('"alpha": 0.0', '"alpha": 1e999'))
    with pytest.raises(ProfileError, match=mentioning("alpha Infinity")):
        Profile.load(path)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_digit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("profiles") / "one.json"
    make().save(path)
    text = path.read_text()
    place = data.draw(
        st.sampled_from([index for index, letter in enumerate(text) if letter.isdigit()])
    )
    digit = data.draw(st.sampled_from(sorted(set("123456789") - {text[place]})))
    path.write_text(text[:place] + digit + text[place + 1 :])
    with pytest.raises(ProfileError):
        Profile.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=mentioning(f"{tmp_path}/none.json")):
        Profile.load(tmp_path / "none.json")


def test_every_mismatch_with_the_model_is_named_with_both_values() -> None:
    other = replace(MODEL, architecture="qwen3", head_dim=128, weights_sha256="cd" * 32)
    with pytest.raises(ProfileError) as refusal:
        make().check_model(other)
    for words in ("'llama'", "'qwen3'", "head_dim is 64", "128", "ab" * 32, "cd" * 32):
        assert words in str(refusal.value)
    make().check_model(replace(MODEL, name="the/same weights elsewhere"))


def test_unknown_weights_and_vocabulary_match_on_architecture_and_geometry() -> None:
    published = make(model=replace(MODEL, vocab_size=None, weights_sha256=None))
    published.check_model(MODEL)
    with pytest.raises(ProfileError, match=mentioning("query_heads 12 24")):
        published.check_model(replace(MODEL, query_heads=24))


def test_every_mismatch_with_the_options_is_named_with_both_values() -> None:
    make().check_options(**OPTIONS)
    make().check_options(**OPTIONS, parameters={"epsilon": 0.01})
    with pytest.raises(ProfileError, match=mentioning("scorer {'epsilon': 0.01} {'epsilon': 0.5}")):
        make().check_options(**OPTIONS, parameters={"epsilon": 0.5})
    with pytest.raises(ProfileError) as refusal:
        make().check_options(scorer="snapkv", scope="layer", kv_retention=0.3, chunk_tokens=256)
    for words in ("'keydiff'", "'snapkv'", "'model'", "'layer'", "0.5", "0.3", "512", "256"):
        assert words in str(refusal.value)


def test_the_fingerprint_follows_what_determines_the_kv_state_and_nothing_else() -> None:
    base = make()
    same = [
        make(model=replace(MODEL, name="other name")),
        make(calibration=Calibration(1, "elsewhere")),
        # Other statistics, the same counts
        make(mean=np.asarray(base.mean) / 2, std=np.asarray(base.std) / 2),
    ]
    assert same[2].sealed_pages == base.sealed_pages and same[2].groups == base.groups
    assert {profile.fingerprint() for profile in same} == {base.fingerprint()}
    others = [
        make(seed=1),
        make(kv_retention=0.4),
        make(sink_tokens=3),
        make(window_tokens=9),
        make(chunk_tokens=256),
        base.with_pages(32, 4),
        base.with_pages(16, 6),
        make(scorer=ScorerSpec("keydiff")),
        make(scorer=ScorerSpec("snapkv", {"epsilon": 0.01})),
        make(model=replace(MODEL, weights_sha256="cd" * 32)),
    ]
    assert len({profile.fingerprint() for profile in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"std": np.zeros((2, 6))}, "std"),
        ({"mean": np.full((3, 6), np.nan)}, "budgets"),
        ({"mean": np.full((3, 6), 1.5)}, "mean"),
        ({"layers": [0, 2, 7]}, "layers"),
        ({"alpha": -1.0, "std": np.zeros((3, 6))}, "alpha"),
        ({"kv_retention": 0.01}, "smallest possible"),
        ({"kv_retention": 1.0}, "kv_retention"),
        ({"chunk_tokens": 500}, "chunk_tokens"),
        ({"model": replace(MODEL, head_dim=0)}, "head_dim"),
    ],
)
def test_statistics_that_make_no_profile_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(**changes)


def test_a_profile_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().kv_retention = 0.9


def test_find_prefers_exact_weights_then_earlier_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    make(seed=1, model=replace(MODEL, weights_sha256=None)).save(first / "a.json")
    make(seed=2, model=replace(MODEL, weights_sha256=None)).save(second / "a.json")
    make(seed=3, kv_retention=0.25).save(second / "b.json")
    (first / "damaged.json").write_text("{")
    folders = [tmp_path / "absent", first, second]
    with caplog.at_level(logging.WARNING):
        found = find_profile(folders, MODEL, **OPTIONS)
    assert found == make(seed=1, model=replace(MODEL, weights_sha256=None))
    assert "damaged.json" in caplog.text
    make(seed=4).save(second / "c.json")
    assert find_profile(folders, MODEL, **OPTIONS) == make(seed=4)
    assert find_profile(folders, MODEL, **{**OPTIONS, "kv_retention": 0.25}) == make(
        seed=3, kv_retention=0.25
    )
    assert find_profile(folders, MODEL, **{**OPTIONS, "scope": "layer"}) is None
    assert find_profile(folders, MODEL, **OPTIONS, parameters={"epsilon": 0.5}) is None
    assert find_profile(folders, replace(MODEL, layers=7), **OPTIONS) is None
