"""Lengths are compared with the model's limit before a text of that length is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tangram.cli import app
from tests.mentions import mentions

FLAGS = ["--load-format", "dummy", "--chunk-tokens", "16777216"]


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "given",
    [
        ["calibrate", "-o", "p.json"],
        ["calibrate", "--train-gate", "g.safetensors"],
        ["generate", "-p", "a", "--scorer", "keydiff", "--max-num-batched-tokens", "20000000"],
        ["eval", "--no-align", "--methods", "uniform", "--context-tokens", "512"],
        ["eval", "--methods", "full", "--context-tokens", "16777216"],
        ["eval", "--methods", "full", "--suites", "fidelity", "--context-tokens", "16777216"],
    ],
    ids=" ".join,
)
def test_a_length_beyond_the_model_is_refused_before_a_text_is_written(
    given: list[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    for written in (
        "tangram.calibrate.texts._one",
        "tangram_lab.accuracy.budget.Budget.fill",
        "tangram_lab.accuracy.passages._sources",
    ):
        monkeypatch.setattr(written, None)
    result = CliRunner().invoke(app, [given[0], model, *given[1:], *FLAGS])
    assert result.exit_code == 2, result.exception
    name = "context_tokens" if given[-1] == "16777216" else "chunk_tokens"
    assert mentions(result.stderr, f"error: {name} 16777216 1024")
