"""What a calibration is worth: overflow, agreement and sample counts, against heads whose needs are
known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tangram.calibrate.measure import Scores, calibrate
from tangram.calibrate.observations import Observations, reserved_fractions
from tangram.cli import app
from tangram.compress.profile import ModelFingerprint, ProfileOptions, ScorerSpec
from tangram.errors import ConfigError
from tangram_lab.calibration.calibration_report import markdown, report
from tangram_lab.calibration.enough import samples_needed
from tangram_lab.calibration.kinds import correlate_kinds, measure_agreement
from tangram_lab.calibration.lost_entries import (
    make_profile,
    measure_held_out_overflow,
    overflow,
    transfer,
)
from tests.mentions import mentioning, mentions

CHUNK = 16


def calibrate_samples(
    needs: Sequence[np.ndarray[Any, Any]],
    kinds: Sequence[str],
    retentions: Sequence[float] = (0.5,),
    page_tokens: int = 4,
) -> list[Observations]:
    """The evidence of samples whose chunks need `needs[n]` [chunks, L, H] entries, which add up to
    ρ of each chunk.
    """
    layers, heads = needs[0].shape[1:]

    def source(sample: Sequence[int]) -> Iterator[Scores]:
        for needed in needs[sample[0]]:
            yield np.where(np.arange(CHUNK) < needed[..., None], 1.0, 0.0).astype(np.float32)

    shares: list[Any] = []
    profiles = calibrate(
        source,
        [[number] * (CHUNK * len(chunks)) for number, chunks in enumerate(needs)],
        ProfileOptions(
            ModelFingerprint("acme/tiny", "llama", layers, heads, heads, 16),
            range(layers),
            ScorerSpec("keydiff"),
            "model",
            CHUNK,
            page_tokens,
            heads_per_page=1,
            sink_tokens=0,
            window_tokens=0,
        ),
        retentions,
        max_positions=10_000,
        source="known needs",
        observe=shares.append,
    )
    return Observations.gather(profiles, shares, kinds)


def two_heads(*first: int) -> list[np.ndarray[Any, Any]]:
    """Samples of one chunk in which head 0 needs so many of the 16 entries kept and head 1 the
    others.
    """
    return [np.array([[[need, 16 - need]]]) for need in first]


def random_needs(samples: int, seed: int, spread: int) -> list[np.ndarray[Any, Any]]:
    """Two layers of three heads, whose needs vary around fixed ones, in two chunks a sample."""
    rng = np.random.default_rng(seed)
    chunks = []
    for _ in range(2 * samples):
        needs = np.array([14, 12, 9, 6, 4, 3])
        for _ in range(spread):
            giver, taker = rng.permutation(6)[:2]
            if needs[giver] > 1 and needs[taker] < CHUNK:
                needs[giver], needs[taker] = needs[giver] - 1, needs[taker] + 1
        chunks.append(needs.reshape(2, 3))
    return [np.stack(chunks[2 * number : 2 * number + 2]) for number in range(samples)]


def test_the_observer_is_handed_what_each_chunk_of_each_sample_needs() -> None:
    needs = random_needs(4, 0, 5)
    (evidence,) = calibrate_samples(needs, "abab")
    for wishes, needed in zip(evidence.wishes, needs, strict=True):
        np.testing.assert_array_equal(wishes, needed / CHUNK)
    np.testing.assert_allclose(evidence.profile.mean, evidence.fractions.mean(axis=0), atol=1e-5)
    assert make_profile(evidence, range(4)) == evidence.profile


def test_nothing_overflows_where_budgets_cover_the_wishes() -> None:
    (evidence,) = calibrate_samples(two_heads(12, 12, 12), "aaa")
    np.testing.assert_array_equal(reserved_fractions(evidence.profile), [[0.75, 0.25]])
    found = measure_held_out_overflow(evidence)
    for way in ("alpha 0", "alpha 1", "alpha 2", "own", "fitted", "unscaled"):
        assert found[way] == {
            "footprint": 0.5,
            "exceeded": 0.0,
            "lost": 0.0,
            "lost_p5": 0.0,
            "lost_p95": 0.0,
        }
    assert found["uniform"]["exceeded"] == 0.5
    assert found["uniform"]["lost"] == 4 / 16


def test_overflow_is_what_one_counts_by_hand() -> None:
    """Each sample meets the budgets of the other: (12, 4) entries wished, pages for (4, 12), so 8
    of 16 find none.
    """
    (evidence,) = calibrate_samples(two_heads(12, 4), "ab")
    found = measure_held_out_overflow(evidence)
    for way in ("alpha 0", "alpha 2", "fitted", "unscaled"):
        assert (found[way]["exceeded"], found[way]["lost"]) == (0.5, 0.5)
    assert found["own"]["lost"] == 0.0
    assert found["uniform"]["lost"] == 0.25


def test_a_spread_flattens_scaled_budgets_and_fills_unscaled_ones() -> None:
    """Others (16, 0) and (8, 8): μ (12, 4) and σ 4, so B is (12, 4) at α 0 and (16, 12) at α 2, of
    16 entries.
    """
    (evidence,) = calibrate_samples(two_heads(12, 16, 8), "aaa", page_tokens=2)
    assert make_profile(evidence, [1, 2], 0.0).sealed_pages == (6, 2)
    assert make_profile(evidence, [1, 2], 2.0).sealed_pages == (5, 3)
    # Left out in turn: (16, 0) and (8, 8) fill 16 + 12 entries, (12, 4) and (8, 8) 14 + 10, (12, 4)
    # and (16, 0) 16 + 6.
    unscaled = measure_held_out_overflow(evidence)["unscaled"]
    assert unscaled["footprint"] == pytest.approx((28 + 24 + 22) / 3 / 32, abs=1e-5)
    assert unscaled["lost"] == pytest.approx((0 + 2 + 2) / 3 / 16, abs=1e-5)


def test_a_profile_of_one_kind_serves_its_own_and_not_the_other() -> None:
    (evidence,) = calibrate_samples(two_heads(12, 4, 12, 4), "abab")
    found = transfer(evidence, 0.0)
    assert found["a"] == {"a": 0.0, "b": 0.5}
    assert found["b"] == {"a": 0.5, "b": 0.0}
    assert found["all others"] == {"a": 0.5, "b": 0.5}
    assert found["all"] == {"a": 0.25, "b": 0.25}, (
        "(12, 4), (4, 12), (4, 12) share out as two pages each"
    )
    assert transfer(calibrate_samples(two_heads(12, 4), "aa")[0], 0.0) == {}
    lonely = transfer(calibrate_samples(two_heads(12, 4), "ab")[0], 0.0)
    assert lonely["a"] == {"b": 0.5}, "one sample cannot be held out of itself"


def test_where_every_group_needs_the_whole_chunk_nothing_is_left_to_fit() -> None:
    (evidence,) = calibrate_samples(two_heads(8, 8), "aa", page_tokens=8)
    found = measure_held_out_overflow(evidence)
    assert (found["fitted"]["footprint"], found["fitted"]["lost"]) == (0.5, 0.0)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    grown=st.floats(0.0, 1.0),
)
def test_larger_budgets_never_lose_more(
    seed: int, shape: tuple[int, int, int], grown: float
) -> None:
    rng = np.random.default_rng(seed)
    wishes, budget = rng.random(shape) + 1e-3, rng.random(shape[1:])
    exceeded, lost = overflow(wishes, budget)
    more = overflow(wishes, budget + grown)
    assert 0.0 <= more[1] <= lost <= 1.0 and 0.0 <= more[0] <= exceeded <= 1.0
    assert (lost > 0) == (exceeded > 0) == bool((wishes > budget).any())
    assert overflow(wishes, wishes.max(axis=0)) == (0.0, 0.0)


@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_fitted_counts_lose_least_of_all_that_reserve_as_much(seed: int, spread: int) -> None:
    """All samples are alike, so what is fitted to the others is fitted to the one left out."""
    sample = random_needs(1, seed, spread)[0]
    (evidence,) = calibrate_samples([sample] * 3, "aaa", page_tokens=2)
    found = measure_held_out_overflow(evidence)
    for way in ("uniform", "alpha 0", "alpha 1", "alpha 2", "own"):
        assert found["fitted"]["footprint"] == found[way]["footprint"]
        assert found["fitted"]["lost"] <= found[way]["lost"] + 1e-5


def test_kinds_that_are_alike_correlate_fully_and_those_reversed_inversely() -> None:
    ascending, descending = np.arange(6.0).reshape(2, 3), np.arange(6.0)[::-1].reshape(2, 3)
    fractions, kinds = (
        np.stack([ascending, ascending, descending, 2 * descending]),
        ["a", "b", "c", "c"],
    )
    table = correlate_kinds(fractions, kinds)
    assert table["a"] == {"a": 1.0, "b": 1.0, "c": -1.0}
    assert table["c"]["c"] == 1.0
    pairs = measure_agreement(fractions, kinds)
    assert (pairs["same kind"].mean, pairs["same kind"].min) == (1.0, 1.0)
    assert (pairs["other kind"].mean, pairs["other kind"].min) == (pytest.approx((1 - 4) / 5), -1.0)
    assert correlate_kinds(np.ones((2, 2, 3)), ["a", "b"]) == {}, "nothing to rank"
    assert measure_agreement(np.ones((2, 2, 3)), ["a", "b"]) == {}


def test_more_samples_come_closer_to_all() -> None:
    (evidence,) = calibrate_samples(random_needs(60, 1, 12), ["a", "b", "c"] * 20, page_tokens=1)
    found = samples_needed(evidence, draws=40)
    assert list(found) == [5, 10, 25, 50], "100 is more than there are"
    for name in ("mean", "budget", "pages"):
        medians = [figures[name]["median"] for figures in found.values()]
        assert medians == sorted(medians, reverse=True) and medians[0] > medians[-1], name
    assert (
        found[50]["mean"]["p95"] - found[50]["mean"]["p5"]
        < found[5]["mean"]["p95"] - found[5]["mean"]["p5"]
    )
    assert found[50]["rank"]["median"] >= found[5]["rank"]["median"] > 0.9
    assert found[50]["lost"]["median"] < found[5]["lost"]["p95"]
    assert samples_needed(evidence, draws=40) == found, "the same draws every time"


def test_draws_take_kinds_in_proportion() -> None:
    """With two kinds, alike within and unlike each other, any even draw has the means of all."""
    (evidence,) = calibrate_samples(two_heads(*[12, 4] * 6), "ab" * 6)
    assert samples_needed(evidence, sizes=[2, 4, 10])[4]["mean"] == {
        "median": 0.0,
        "p5": 0.0,
        "p95": 0.0,
    }


def test_a_report_covers_every_rho_and_survives_json() -> None:
    needs = random_needs(6, 3, 8)
    evidence = calibrate_samples(needs, ["a", "b"] * 3, retentions=(0.5, 0.4))
    found = report(evidence)
    assert json.loads(json.dumps(found)) == found
    assert list(found["retentions"]) == ["0.5", "0.4"]
    assert (found["samples"], found["kinds"], found["chunks"], found["heads"]) == (
        6,
        {"a": 3, "b": 3},
        12,
        6,
    )
    text = markdown(found)
    for heading in (
        "## ρ 0.5",
        "## ρ 0.4",
        "Held-out overflow",
        "Fewer samples",
        "between kinds",
        "Entries lost, made of",
    ):
        assert heading in text
    lost = found["retentions"]["0.4"]["overflow"]["alpha 2"]["lost"]
    assert f"| {lost:.2%} |" in text


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"samples is 1.*at least 2"):
        report(calibrate_samples(two_heads(12), "a"))
    with pytest.raises(ConfigError, match=mentioning("kinds 1 2")):
        calibrate_samples(two_heads(12, 4), "a")


def test_the_picture_is_a_png_with_a_box_for_each_head(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tangram_lab.cli.retention_plot import plot_retention

    evidence = calibrate_samples(random_needs(4, 0, 5), "abab", retentions=(0.5, 0.4))
    picture = plot_retention(evidence, "six heads")
    picture.savefig(tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [len(axes.patches) - 1 for axes in picture.axes] == [6, 6], (
        "boxes, and the line of what is reserved"
    )
    names = [label.get_text() for label in picture.axes[0].get_xticklabels()]
    assert sorted(names) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert names[0] == "0.0" and names[-1] == "1.2", "the head that needs most comes first"
    legend = picture.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "reserved"]


def test_many_heads_are_drawn_in_several_rows() -> None:
    pytest.importorskip("matplotlib")
    from tangram_lab.cli.retention_plot import plot_retention

    needs = [np.full((1, 50, 5), 8)] * 2
    picture = plot_retention(calibrate_samples(needs, "aa"), "250 heads")
    assert [len(axes.patches) - 1 for axes in picture.axes] == [84, 83, 83]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--plot", "heads.jpg"], "plot heads.jpg PNG"),
        (["--report", "report.txt"], "report report.txt .json .md"),
        (["--report", "absent/report.md"], "report absent/report.md"),
        (["--report", "report.md", "--samples", "1"], "report report.md, 2 1)"),
        (["--also-at", "0.3"], "also_at 0.3 --plot --report"),
        (["--report", "report.md", "--also-at", "0.3,1.5"], "also_at 1.5"),
        (["--report", "report.md", "--also-at", ""], "also_at ''"),
        (["--report", "report.md", "--also-at", "some"], "also_at 'some'"),
        (["--report", "report.md", "--import", "budgets.npz"], "report report.md, --import"),
    ],
)
def test_what_calibration_could_not_show_is_refused_before_any_work(
    options: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tangram.model.load.load_model", None)
    monkeypatch.setattr("tangram_lab.cli.study.find_spec", lambda name: name)
    refused = CliRunner().invoke(app, ["calibrate", "smollm2", "-o", "profile.json", *options])
    assert refused.exit_code == 2
    assert mentions(refused.output, named)
    assert not list(tmp_path.iterdir())


def test_drawing_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram_lab.cli.study.find_spec", lambda name: None)
    refused = CliRunner().invoke(
        app, ["calibrate", "smollm2", "-o", str(tmp_path / "p.json"), "--plot", "heads.png"]
    )
    assert refused.exit_code == 2 and "pip install matplotlib" in " ".join(refused.output.split())
