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
        ("{", "speculative_config is no JSON"),
        ("[]", "speculative_config is no JSON object: write it like"),
        ({}, "speculative_config.method is missing, it must be one of compressed_kv, ngram"),
        ({"method": "eagle"}, "speculative_config.method is 'eagle', it must be one of"),
        (
            {"method": "ngram", "kv_retention": 0.5},
            "speculative_config.kv_retention is no field of ngram: it has num_speculative_tokens",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "speculative_config.num_speculative_tokens is 0, it must be at least 1 and at most 64",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "4"},
            "speculative_config.num_speculative_tokens is '4', it must be an integer",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": True},
            "speculative_config.num_speculative_tokens is True, it must be an integer",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is 4, it must be at most prompt_lookup_max (3)",
        ),
        ({"method": "draft_model"}, "speculative_config.model is missing"),
        (
            {"method": "draft_model", "model": "a", "kv_cache_gib": 0},
            "speculative_config.kv_cache_gib is 0, it must be greater than 0",
        ),
        (
            {"method": "draft_model", "model": "a", "kv_cache_gib": "1"},
            "speculative_config.kv_cache_gib is '1', it must be a number",
        ),
        ({"method": "compressed_kv", "kv_retention": float("nan")}, "kv_retention is nan"),
    ],
)
def test_what_is_wrong_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_speculative_config(given)
    assert said in str(error.value)


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
    with pytest.raises(ConfigError, match=r"kv_retention is 0\.3, .* speculative_config\.kv_ret"):
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
    said = "speculative_config.prompt_lookup_max is 1, it must be at least 2 and at most 64"
    assert said in " ".join(result.output.split())
