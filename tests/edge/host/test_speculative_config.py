"""What `--speculative-config` takes, and how it says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.speculative_config import (
    METHODS,
    CompressedKv,
    DraftModel,
    Ngram,
    Suffix,
    read_speculative_config,
)
from tests.mentions import mentioning, mentions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            '{"method": "compressed_kv", "num_speculative_tokens": 4, "kv_retention": 0.1}',
            CompressedKv(4, 0.1),
        ),
        ({"method": "compressed_kv"}, CompressedKv(8, 0.25)),
        ({"method": "ngram", "prompt_lookup_max": 3}, Ngram(8, 2, 3)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2}, Suffix()),
        ({"method": "draft_model", "model": "small"}, DraftModel(8, "small")),
        ({"method": "draft_model", "model": "a", "kv_cache_gib": 2}, DraftModel(8, "a", 2)),
    ],
)
def test_what_is_given_is_what_holds(given: Any, expected: object) -> None:
    found = read_speculative_config(given)
    if isinstance(found, Suffix):
        assert found.suffix_decoding_max_spec_factor == 2
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "speculative_config JSON"),
        ("[]", 'speculative_config JSON {"method":'),
        ({}, "speculative_config.method compressed_kv ngram"),
        ({"method": "eagle"}, "speculative_config.method 'eagle' compressed_kv"),
        (
            {"method": "ngram", "kv_retention": 0.5},
            "speculative_config.kv_retention ngram num_speculative_tokens",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "speculative_config.num_speculative_tokens 0 1 64",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "4"},
            "speculative_config.num_speculative_tokens '4' integer",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": True},
            "speculative_config.num_speculative_tokens True integer",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "speculative_config.prompt_lookup_min 4 prompt_lookup_max 3",
        ),
        ({"method": "draft_model"}, "speculative_config.model missing"),
        (
            {"method": "draft_model", "model": "a", "kv_cache_gib": 0},
            "speculative_config.kv_cache_gib 0",
        ),
        (
            {"method": "draft_model", "model": "a", "kv_cache_gib": "1"},
            "speculative_config.kv_cache_gib '1' number",
        ),
        (
            {"method": "compressed_kv", "kv_retention": float("nan")},
            "speculative_config.kv_retention nan 0.99",
        ),
    ],
)
def test_what_is_wrong_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_speculative_config(given)
    assert mentions(str(error.value), said)


def test_every_method_says_what_it_is() -> None:
    assert all(kind.__doc__ for kind in METHODS.values())


def test_text_and_mapping_are_one_config() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    configs = [EngineConfig(speculative_config=form) for form in (given, json.dumps(given))]
    assert configs[0] == configs[1]
    assert configs[0].speculation == Ngram(3) and EngineConfig().speculation is None
    made = [CompressedKv(), Ngram(), Suffix(), DraftModel(model="small")]
    assert [config.method for config in made] == list(METHODS)


def test_drafts_of_compressed_entries_keep_everything() -> None:
    method = {"method": "compressed_kv"}
    assert EngineConfig(speculative_config=method).kv_retention == 1.0
    with pytest.raises(
        ConfigError, match=mentioning("kv_retention 0.3 speculative_config.kv_retention")
    ):
        EngineConfig(speculative_config=method, kv_retention=0.3)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "hello"],
        ["chat"],
        ["serve"],
        ["bench", "serving", "throughput"],
        ["bench", "serving", "multi-turn"],
    ],
    ids=" ".join,
)
def test_every_command_with_an_engine_takes_it_and_names_what_is_wrong(command: list[str]) -> None:
    wrong = '{"method": "ngram", "prompt_lookup_max": 1}'
    result = CliRunner().invoke(app, [*command, "--speculative-config", wrong])
    assert result.exit_code == 2
    assert mentions(result.output, "speculative_config.prompt_lookup_max 1 2 64")
