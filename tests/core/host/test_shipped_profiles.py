"""Profiles that come with the project or from published budgets: whole, found, and as saving as
their authors say.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangram.calibrate.published_budgets import MODELS, import_published
from tangram.compress.groups import cluster, group_budgets
from tangram.compress.library import find_profile, find_shipped_profiles
from tangram.compress.profile import ALPHA, PAPER_ALPHA, Profile
from tangram.compress.provenance import ScorerSpec
from tangram.errors import ProfileError

SHIPPED = sorted(find_shipped_profiles().glob("*.json"))
IMPORTED = [path for path in SHIPPED if not path.name.startswith("smollm2.")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_are_whole_and_named_after_their_content(path: Path) -> None:
    profile = Profile.load(path)
    assert path.name == profile.file_name
    assert path.stat().st_size < 40_000
    assert 0.98 * profile.kv_retention < profile.realised_retention <= profile.kv_retention
    assert ("aiha-lab/tangram" in profile.calibration.source) == (path in IMPORTED)
    assert profile.alpha == (PAPER_ALPHA if path in IMPORTED else ALPHA)
    assert profile == profile.with_pages(profile.page_tokens, profile.heads_per_page)
    assert (profile.scales is None) == (path in IMPORTED)


@pytest.mark.parametrize("model", ["llama-3.1-8b-instruct", "qwen3-4b-instruct-2507"])
@pytest.mark.parametrize("scorer", ["keydiff", "expected_attention"])
@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("kv_retention", [0.25, 0.5])
@pytest.mark.parametrize("chunk_tokens", [512, 2048])
def test_shipped_profiles_are_found_for_their_models(
    model: str, scorer: str, scope: str, kv_retention: float, chunk_tokens: int
) -> None:
    loaded = replace(
        MODELS[model], name="/models/mine", vocab_size=128_256, weights_sha256="ab" * 32
    )
    assert (
        find_profile([find_shipped_profiles()], loaded, scorer, scope, kv_retention, chunk_tokens)
        is not None
    )


@pytest.mark.parametrize(
    "path", [path for path in IMPORTED if ".r0.25." in path.name], ids=lambda path: path.stem
)
def test_published_budgets_reclaim_what_their_authors_report(path: Path) -> None:
    """Of ρ 0.3 at 4 heads a page: adjacent 0.43-0.67, clustered 0.51-0.68, across layers 0.66-0.70
    (Tangram).

    Their fractions count the always-kept tokens, ours do not: those are put back first, so that the
    mean is 0.3.
    """
    profile = Profile.load(path)
    mean = np.asarray(profile.mean)
    always = (0.3 - mean.mean()) / (1 - mean.mean())
    budgets = always + (1 - always) * mean

    def measure_reclaimed(heads_per_page: int, across: Any, ordered: bool) -> float:
        sorted_by = budgets if ordered else np.ones_like(budgets)
        groups = cluster(sorted_by, profile.layers, heads_per_page, across)
        return 1.0 - float(group_budgets(budgets, profile.layers, groups).mean())

    monolithic = measure_reclaimed(8, "layer", True)
    adjacent, clustered = measure_reclaimed(4, "layer", False), measure_reclaimed(4, "layer", True)
    across_layers = measure_reclaimed(4, "model", True)
    assert monolithic < adjacent < clustered < across_layers < 0.7
    assert 0.43 <= adjacent <= 0.67
    assert 0.51 <= clustered <= 0.685
    assert across_layers >= 0.66


@pytest.fixture
def published(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "published.npz"
    prefix = "gpt-oss-20b/ea/layer"
    arrays = {
        f"{prefix}/mean": rng.random((12, 8)).astype(np.float32) * 0.2,
        f"{prefix}/std": rng.random((12, 8)).astype(np.float32) * 0.05,
        f"{prefix}/layers": np.arange(1, 24, 2),
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_published_budgets_are_rescaled_to_the_rho_wanted(published: Path) -> None:
    profile = import_published(
        published, "gpt-oss-20b", ScorerSpec("expected_attention"), "layer", 0.5
    )
    assert profile.layers == tuple(range(1, 24, 2))
    assert (profile.model.head_dim, profile.model.query_heads) == (64, 64)
    assert (profile.model.weights_sha256, profile.model.vocab_size) == (None, None)
    assert (profile.scorer.name, profile.scope, profile.alpha) == (
        "expected_attention",
        "layer",
        2.0,
    )
    assert 0.49 < profile.realised_retention <= 0.5
    top = np.unravel_index(np.argmax(profile.budgets), profile.budgets.shape)
    assert (profile.layers[int(top[0])], int(top[1])) == profile.groups[0][0]


def test_what_the_file_of_published_budgets_lacks_is_named(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="gpt-oss-20b/ea/model"):
        import_published(published, "gpt-oss-20b", ScorerSpec("expected_attention"), "model", 0.5)
    with pytest.raises(ProfileError, match=r"model is 'gpt-2'.*llama-3\.1-8b-instruct"):
        import_published(published, "gpt-2", ScorerSpec("keydiff"), "model", 0.5)
    with pytest.raises(ProfileError, match=r"scorer is 'ea'.*expected_attention"):
        import_published(published, "gpt-oss-20b", ScorerSpec("ea"), "layer", 0.5)
    garbage = tmp_path / "garbage.npz"
    garbage.write_bytes(b"PK\x03\x04 not a zip")
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    for path in (garbage, array, tmp_path / "absent.npz"):
        with pytest.raises(ProfileError, match=path.name):
            import_published(path, "gpt-oss-20b", ScorerSpec("keydiff"), "layer", 0.5)
