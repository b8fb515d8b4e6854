"""Which methods a grid holds, and how an engine is told to follow each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tangram.config import EngineConfig, Scope
from tangram.errors import ConfigError
from tangram.speculative_config import CompressedKv
from tangram_lab.accuracy.methods import NAMES, Grid, Method, choose_alignment
from tests.mentions import mentioning


def grid(**changes: Any) -> Grid:
    options: dict[str, Any] = {
        "names": NAMES,
        "scorers": ["keydiff", "snapkv"],
        "retentions": [0.5, 0.3],
    }
    return Grid(**(options | changes))


def scope_of(scorer: str) -> Scope:
    """Every scorer is served alike."""
    return "model"


def test_what_makes_no_difference_is_measured_once() -> None:
    methods = grid(alphas=[0, 2], scopes=["model", "layer"]).methods(4096, scope_of)
    counts = {name: sum(method.name == name for method in methods) for name in NAMES}
    assert counts == {
        "full": 1,
        "uniform": 4,
        "dynamic": 8,
        "static": 16,
        "one-shot": 8,
        "lossless": 2,
    }
    assert len(set(methods)) == len(methods) == len({method.title for method in methods})


def test_one_shot_takes_the_context_in_one_piece_and_no_engine_follows_it() -> None:
    dynamic, one_shot = grid(
        names=["dynamic", "one-shot"], scorers=["keydiff"], retentions=[0.3]
    ).methods(4096, scope_of)
    assert (dynamic.chunk_tokens, one_shot.chunk_tokens) == (512, 4096)
    for method in (dynamic, one_shot):
        with pytest.raises(ConfigError, match=mentioning(f"methods {method.name}")):
            method.config(EngineConfig())


def test_full_drops_nothing_and_budgets_come_from_a_file() -> None:
    base = EngineConfig(gate="gate.safetensors", heads_per_page=2)
    full = Method("full").config(base)
    assert full.kv_retention == 1.0 and full.profile == ()
    static = Method("static", 0.3, "snapkv", 256, "layer", 1.0, 4).config(base, "profile.json")
    assert (static.scorer, static.scope, static.chunk_tokens, static.kv_retention) == (
        "snapkv",
        "layer",
        256,
        0.3,
    )
    assert static.profile == ("profile.json",) and static.heads_per_page == 2
    assert static.gate is None, "only the scorer that has a gate is given one"
    assert Method("static", 0.3, "fastkvzip", 256).config(base).gate == "gate.safetensors"


def test_lossless_keeps_everything_and_drafts_from_a_profile() -> None:
    (lossless,) = grid(names=["lossless"], scorers=["keydiff"]).methods(4096, scope_of)
    config = lossless.config(EngineConfig(), "profile.json")
    assert config.kv_retention == lossless.kv_retention == 1.0
    assert config.speculation == CompressedKv() and config.profile == ("profile.json",)
    assert lossless.budgeted == replace(
        lossless, name="static", kv_retention=CompressedKv.kv_retention
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"names": ["best"]}, "methods 'best' full"),
        ({"names": []}, "methods empty"),
        ({"retentions": [1.0]}, "retentions 1.0 (0, 1) full"),
        ({"scorers": []}, "scorers empty"),
        ({"names": ["full", "dynamic"], "alphas": [1]}, "alphas [1] full, dynamic static"),
        (
            {"names": ["full", "uniform"], "scopes": ["layer"]},
            "scopes ['layer'] dynamic one-shot static",
        ),
        ({"names": ["full"], "sink_tokens": 0}, "sink_tokens 0 full static uniform"),
        ({"names": ["full"], "window_tokens": 8}, "window_tokens 8 full static uniform"),
        ({"scopes": ["head"]}, "scopes 'head' layer model"),
        ({"chunk_tokens": [0]}, "chunk_tokens 0 1"),
        ({"alphas": [-1.0]}, "alphas -1.0 0"),
        ({"sink_tokens": 8}, "sink_tokens 8 dynamic 4"),
        ({"window_tokens": 0}, "window_tokens 0 dynamic"),
    ],
)
def test_impossible_grids_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(said)):
        grid(**changes)


def test_contexts_end_where_every_chunk_does() -> None:
    chunks = grid(chunk_tokens=[256, 1024], names=["static", "dynamic"])
    assert choose_alignment(chunks.methods(4096, scope_of), align=True) == 1024
    assert choose_alignment(chunks.methods(4096, scope_of), align=False) is None
    assert choose_alignment(chunks.methods(4096, scope_of), align=True, unit=4096) == 4096
    with pytest.raises(ConfigError, match=mentioning("chunk_tokens 1024 align_tokens 1536")):
        choose_alignment(chunks.methods(4096, scope_of), align=True, unit=1536)
    with pytest.raises(ConfigError, match=mentioning("align_tokens 1024 no_align")):
        choose_alignment(chunks.methods(4096, scope_of), align=False, unit=1024)
    assert choose_alignment(grid(chunk_tokens=[256]).methods(4096, scope_of), align=True) == 4096
    with pytest.raises(ConfigError, match=mentioning("chunk_tokens 384 1024")):
        choose_alignment(
            grid(chunk_tokens=[384, 1024], names=["static"]).methods(4096, scope_of), align=True
        )
    with pytest.raises(ConfigError, match=mentioning("one-shot align")):
        choose_alignment(grid().methods(4096, scope_of), align=False)
