"""Naive beside cached decoding: the positions projected are counted, and the tokens are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from bench.serving.schedules import measure
from tangram.cli import app
from tangram.errors import TangramError
from tangram.model.load import LoadedModel
from tangram_lab import naive
from tangram_lab.load.asks import Ask
from tests.small_engines import small_engine

Adopt = Callable[[PretrainedConfig], LoadedModel]
CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def decode_both(
    loaded: LoadedModel, prompt: list[int], tokens: int
) -> tuple[naive.DecodingRun, naive.DecodingRun]:
    engine = small_engine(loaded, chunk_tokens=128, max_num_batched_tokens=256)
    plain = naive.decode_naively(loaded, prompt, tokens)
    return plain, naive.decode_with_cache(engine, loaded, prompt, tokens)


def test_a_hundred_tokens(adopt_tiny: Adopt) -> None:
    plain, cached = decode_both(adopt_tiny(CONFIG), [7], 100)
    naive.check_equal(plain, cached)
    assert (plain.positions, cached.positions) == (5_050, 100)
    assert plain.seconds > 0 and cached.seconds > 0 and len(set(plain.token_ids)) > 3


def test_a_prompt_is_projected_once_with_a_cache(adopt_tiny: Adopt) -> None:
    plain, cached = decode_both(adopt_tiny(CONFIG), list(range(20, 50)), 6)
    naive.check_equal(plain, cached)
    assert plain.positions == naive.count_naive_positions(30, 6) == 30 + 31 + 32 + 33 + 34 + 35
    assert cached.positions == naive.count_cached_positions(30, 6) == 35


def test_tokens_that_differ_are_not_compared(adopt_tiny: Adopt) -> None:
    plain, cached = decode_both(adopt_tiny(CONFIG), [7], 4)
    wrong = replace(cached, token_ids=[*cached.token_ids[:2], -1, cached.token_ids[3]])
    with pytest.raises(TangramError, match=r"token 3 .*-1\b"):
        naive.check_equal(plain, wrong)


def bench_naive(folder: Path, *options: str) -> Any:
    fixed = ["--load-format", "dummy", "--device", "cpu", "--repeats", "1"]
    return CliRunner().invoke(app, ["bench", "naive", str(folder), *fixed, *options])


def test_the_command_writes_its_figures(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "naive.json"
    ended = bench_naive(folder, "--tokens", "20", "--prompt-tokens", "3", "-o", str(target))
    assert ended.exit_code == 0, ended.output
    assert "250" in ended.output and "22" in ended.output
    written = json.loads(target.read_text())
    assert written["naive"]["positions"] == sum(range(3, 23)) == 250
    assert written["cached"]["positions"] == 22
    assert len(written["naive"]["seconds"]) == written["repeats"] == 1


def test_what_is_too_long_is_refused(folder: Path) -> None:
    refused = bench_naive(folder, "--tokens", "2048")
    assert refused.exit_code == 2
    assert "prompt_tokens + tokens is 2049" in " ".join(refused.output.split())


def test_schedules_are_recorded_row_by_row(adopt_tiny: Adopt) -> None:
    loaded = adopt_tiny(CONFIG)
    asks = [Ask((5, 6, 7), 6), Ask((8, 9, 10), 2), Ask((11, 12, 13), 3)]
    engine = small_engine(loaded, max_num_seqs=2, enable_prefix_caching=False)
    found = measure(engine, asks, repeats=1)
    steps = {
        kind: [sorted(row[0] for row in step["rows"]) for step in one["steps"]]
        for kind, one in found.items()
    }
    # Of requests that come at once, the last is submitted first.
    assert steps["continuous"] == [*[[1, 2]] * 2, [0, 2], *[[0]] * 5]
    assert steps["static"] == [*[[0, 1]] * 2, *[[0]] * 4, *[[2]] * 3]
    rows = [row for step in found["static"]["steps"] for row in step["rows"]]
    assert rows[:3] == [[1, "tail", 3], [0, "tail", 3], [1, "decode", 1]]
    for one in found.values():
        ends = [step["at"] for step in one["steps"]]
        assert all(step["seconds"] > 0 for step in one["steps"]) and ends == sorted(ends)
    waits = {kind: one["summary"]["ttft_s"]["p99"] for kind, one in found.items()}
    assert waits["static"] > waits["continuous"], "a later batch waits for the one before"
