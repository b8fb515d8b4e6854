"""The scorers' names and options: what a profile remembers, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.compress.scorers import SCORERS, Scorer, make_scorer
from tangram.compress.scorers.expected_attention import ExpectedAttention
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.kvzip import KVzip
from tangram.compress.scorers.snapkv import SnapKV
from tangram.errors import ConfigError
from tests.mentions import mentioning

GATE = Path(__file__).parents[2] / "fixtures" / "kvpress" / "gate.safetensors"


@pytest.mark.parametrize(
    "scorer",
    [make_scorer(name, gate=GATE if name == "fastkvzip" else None) for name in SCORERS],
    ids=lambda scorer: scorer.name,
)
def test_parameters_can_be_written_to_a_profile(scorer: Scorer) -> None:
    assert json.loads(json.dumps(scorer.parameters())) == scorer.parameters()


def test_parameters_tell_every_option() -> None:
    assert SnapKV().parameters() == {"window_tokens": 32, "kernel_tokens": 7, "max_pooling": True}
    assert ExpectedAttention(epsilon=0.5).parameters() == {
        "future_tokens": 512,
        "sinks": 4,
        "epsilon": 0.5,
    }
    assert KVzip(sinks=2).parameters() == {"sinks": 2}


def test_make_scorer_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=mentioning(" ".join(["'snap'", *SCORERS]))):
        make_scorer("snap")


def test_make_scorer_wants_a_gate_where_one_is_used() -> None:
    assert isinstance(make_scorer("fastkvzip", gate=GATE), FastKVzip)
    with pytest.raises(ConfigError, match=mentioning("scorer fastkvzip gate")):
        make_scorer("fastkvzip")
    with pytest.raises(ConfigError, match=mentioning("scorer keydiff gate")):
        make_scorer("keydiff", gate=GATE)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SnapKV(window_tokens=0), "window_tokens is 0"),
        (lambda: SnapKV(kernel_tokens=6), "kernel_tokens is 6"),
        (lambda: ExpectedAttention(future_tokens=0), "future_tokens is 0"),
        (lambda: ExpectedAttention(sinks=-1), "sinks is -1"),
        (lambda: ExpectedAttention(epsilon=float("nan")), "epsilon is nan"),
        (lambda: KVzip(sinks=-1), "sinks is -1"),
    ],
)
def test_parameters_out_of_range_are_named(make: Callable[[], Scorer], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()
