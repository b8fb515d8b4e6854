"""Calibration: dynamic selection against a plain sort, statistics against known heads, and refusals
before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from tangram.calibrate.agreement import rank_stability
from tangram.calibrate.measure import Scores, calibrate, measure_kept_fractions
from tangram.calibrate.text_files import read_kinds, read_texts
from tangram.compress.profile import ModelFingerprint, Profile, ProfileOptions, ScorerSpec
from tangram.config import Scope
from tangram.errors import ConfigError, ProfileError
from tangram.progress import show_progress
from tangram.types import Geometry
from tests.mentions import mentioning

CHUNK = 64
GEOMETRY = Geometry(4, 3, 6, 16, 100, 300, (None, 32, None, None))
MODEL = ModelFingerprint("acme/tiny", "llama", 4, 3, 6, 16, 100, "ab" * 32)
# How much each head of the three full-attention layers matters.
STRENGTH = np.array([[0.1, 3.0, 0.2], [0.4, 0.3, 2.0], [0.5, 0.6, 1.5]])


def by_sorting(
    scores: Scores, retention: float, scope: Scope, sinks: int, window: int
) -> np.ndarray[Any, Any]:
    """The definition, entry by entry: protected first, then by score, position, layer and head."""
    layers, heads, tokens = scores.shape
    kept = np.zeros((layers, heads))
    for pool in [range(layers)] if scope == "model" else [[layer] for layer in range(layers)]:
        entries = [
            (
                not (token < sinks or token >= tokens - window),
                -scores[layer, head, token],
                token,
                layer,
                head,
            )
            for layer in pool
            for head in range(heads)
            for token in range(tokens)
        ]
        protected = sum(not entry[0] for entry in entries)
        for *_, layer, head in sorted(entries)[: max(protected, round(retention * len(entries)))]:
            kept[layer, head] += 1 / tokens
    return kept


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)),
    retention=st.floats(0.01, 0.99),
    scope=st.sampled_from(["model", "layer"]),
    sinks=st.integers(0, 4),
    window=st.integers(0, 5),
    levels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_selection_is_the_sorted_one_ties_and_protected_positions_included(
    shape: tuple[int, int, int],
    retention: float,
    scope: Scope,
    sinks: int,
    window: int,
    levels: int,
    seed: int,
) -> None:
    scores = np.random.default_rng(seed).integers(0, levels, shape).astype(np.float32)
    got = measure_kept_fractions(
        scores, [retention], scope, sink_tokens=sinks, window_tokens=window
    )
    np.testing.assert_allclose(
        got[0], by_sorting(scores, retention, scope, sinks, window), atol=1e-12
    )


def test_heads_with_equal_scores_share_equally() -> None:
    """A position-only method must not favour head 0."""
    scores = np.broadcast_to(np.arange(32, dtype=np.float32), (2, 4, 32))
    for scope in ("model", "layer"):
        got = measure_kept_fractions(scores, [0.25, 0.5], scope, sink_tokens=4, window_tokens=4)
        np.testing.assert_array_equal(got[0], np.full((2, 4), 0.25))
        np.testing.assert_array_equal(got[1], np.full((2, 4), 0.5))


def score_source(sample: Sequence[int]) -> Iterator[Scores]:
    """Scores that depend on the sample, with STRENGTH as each head's scale."""
    for chunk in range(len(sample) // CHUNK):
        rng = np.random.default_rng([sample[0], chunk])
        yield (STRENGTH[..., None] * rng.random((3, 3, CHUNK))).astype(np.float32)


def run(**changes: Any) -> list[Profile]:
    arguments: dict[str, Any] = {
        "score_source": score_source,
        "samples": [[seed] * (CHUNK * (2 + seed % 2) + 9) for seed in range(6)],
        "retentions": [0.3, 0.5],
        "max_positions": GEOMETRY.max_positions,
        "source": "random scores",
        "track": iter,
    }
    arguments |= {name: changes.pop(name) for name in arguments if name in changes}
    layers, scorer = GEOMETRY.full_layers, ScorerSpec("keydiff")
    options = replace(ProfileOptions(MODEL, layers, scorer, "model", CHUNK, 4, 2), **changes)
    return calibrate(options=options, **arguments)


def test_profiles_of_every_rho_come_from_one_pass() -> None:
    calls: list[int] = []

    def count(sample: Sequence[int]) -> Iterator[Scores]:
        calls.append(sample[0])
        return score_source(sample)

    profiles = run(score_source=count)
    assert calls == list(range(6))
    assert [profile.kv_retention for profile in profiles] == [0.3, 0.5]
    for profile in profiles:
        assert profile.layers == (0, 2, 3), "sliding-window layers are not compressed"
        assert profile.realised_retention <= profile.kv_retention
        assert np.asarray(profile.mean).mean() == pytest.approx(profile.kv_retention, abs=0.005)
        assert profile.calibration.samples == 6
        assert profile.calibration.tokens == CHUNK * (2 + 3) * 3
        assert profile.calibration.source == "random scores"
        strongest = [(0, 1), (2, 2), (3, 2)]
        assert set(profile.groups[0]) <= set(strongest)


def test_statistics_are_means_over_chunks_then_over_samples() -> None:
    samples = [[seed] * (CHUNK * (1 + seed)) for seed in range(3)]
    fractions = np.array(
        [
            np.mean(
                [
                    by_sorting(scores, 0.4, "layer", 4 if chunk == 0 else 0, 2)
                    for chunk, scores in enumerate(score_source(sample))
                ],
                axis=0,
            )
            for sample in samples
        ]
    )
    (profile,) = run(samples=samples, scope="layer", retentions=[0.4], window_tokens=2)
    np.testing.assert_allclose(profile.mean, fractions.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(profile.std, fractions.std(axis=0), atol=1e-5)


def test_rank_stability_is_spearmans_over_pairs() -> None:
    fractions = np.random.default_rng(0).integers(0, 9, (5, 4, 3)) / 9.0  # with ties
    pairs = [
        spearmanr(fractions[a].ravel(), fractions[b].ravel()).statistic
        for a, b in combinations(range(5), 2)
    ]
    stability = rank_stability(fractions)
    assert stability is not None
    assert stability.mean == pytest.approx(np.mean(pairs), abs=1e-4)
    assert stability.min == pytest.approx(np.min(pairs), abs=1e-4)
    assert rank_stability(fractions[:1]) is None
    assert rank_stability(np.full((3, 4, 3), 0.5)) is None


def test_a_stable_ranking_is_reported_as_stable() -> None:
    (profile,) = run(retentions=[0.5])
    stability = profile.calibration.rank_stability
    assert stability is not None
    assert stability.min > 0.9


def test_samples_are_cut_to_the_models_context_and_tracked() -> None:
    seen: list[int] = []

    def track(samples: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
        for sample in samples:
            seen.append(len(sample))
            yield sample

    (profile,) = run(samples=[[1] * 1000, [2] * 64], retentions=[0.5], track=track)
    assert seen == [300, 64]
    assert profile.calibration.tokens == 4 * CHUNK + CHUNK


def never(sample: Sequence[int]) -> Iterator[Scores]:
    raise AssertionError("scored before the arguments were checked")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"samples": [[1] * 64, [1] * 63]}, "sample 1 63 64"),
        ({"samples": []}, "no samples"),
        ({"retentions": [0.5, 0.01]}, "kv_retention 0.01 0.1389"),
        ({"retentions": [1.0]}, "kv_retention 1.0"),
        ({"page_tokens": 5}, "chunk_tokens 64 page_tokens 5"),
        ({"heads_per_page": 0}, "heads_per_page 0"),
    ],
)
def test_bad_arguments_are_refused_before_scoring(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(named)):
        run(score_source=never, **changes)


def broken(kind: str) -> Any:
    def source(sample: Sequence[int]) -> Iterator[Scores]:
        for chunk, scores in enumerate(score_source(sample)):
            if kind == "nan" and chunk == 1:
                scores[1, 2, 7] = np.nan
            if kind != "short" or chunk == 0:
                yield scores[:, :2] if kind == "shape" else scores

    return source


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("nan", "sample 0, chunk 1 NaN row head 2, token 7"),
        ("shape", "sample 0, chunk (3, 2, 64)"),
        ("short", "sample 0 2 1"),
    ],
)
def test_scores_that_cannot_be_trusted_are_refused(kind: str, named: str) -> None:
    with pytest.raises(ProfileError, match=mentioning(named)):
        run(score_source=broken(kind))


def test_progress_is_silent_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert [list(sample) for sample in show_progress([[1], [2]])] == [[1], [2]]
    assert capfd.readouterr() == ("", "")


def test_texts_are_read_from_json_lines_and_from_plain_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [{"text": "one\u2028line"}, {"prompt": "two", "id": 7}, {"messages": chat}]
    path = tmp_path / "data.jsonl"
    path.write_text(
        "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8"
    )
    assert read_texts(path) == ["one\u2028line", "two", "system: Be brief.\nuser: Hi"]
    assert read_kinds(path) == ["data", "data", "data"]
    path.write_text('{"text": "one", "kind": "summary"}\n{"text": "two"}\n')
    assert read_kinds(path) == ["summary", "data"]
    plain = tmp_path / "data.txt"
    plain.write_text("one\ntwo\n", encoding="utf-8")
    assert (read_texts(plain), read_kinds(plain)) == (["one\ntwo\n"], ["data"])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{oops", "line 2: JSON"),
        ('{"question": "why"}', 'line 2: "text"'),
        ('{"text": 7}', 'line 2: "text"'),
        ('{"text": "why", "kind": 7}', 'line 2: "kind" 7, string'),
        ("[1]", 'line 2: "text"'),
        ('{"messages": [{"role": "user"}]}', 'line 2: "content"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=mentioning(named)):
        read_texts(path)


def test_an_unreadable_or_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jsonl", "binary.txt", "absent.jsonl"):
        with pytest.raises(ConfigError, match=name):
            read_texts(tmp_path / name)
