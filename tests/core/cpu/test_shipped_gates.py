"""Gates that come with the project: whole, found for the weights they were trained for, and for no
other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import Profile, ProfileOptions
from tangram.compress.provenance import Calibration
from tangram.compress.scorers import make_scorer
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import find_gate, find_shipped_gates, load_gate
from tangram.config import EngineConfig
from tangram.engine.setup.build import engine_of
from tangram.engine.setup.profiles import scorer_spec
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.methods import Method
from tests.mentions import mentioning, mentions
from tests.small_engines import GREEDY, run, small_engine

SHIPPED = sorted(find_shipped_gates().glob("*.safetensors"))
NONE_SHIPS = "gate ships --train-gate"
HAY = (
    "The lake was calm and the boats lay in the harbour. Some people walked along the shore and "
    "talked. "
)


@pytest.fixture(scope="module")
def other(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    """A model that no gate ships for."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        pad_token_id=2,
    )
    return adopt_tiny(config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_gate_is_whole_and_says_where_it_is_from(path: Path) -> None:
    gate = load_gate(path)
    assert gate.training is not None and gate.training.model.weights_sha256 is not None
    model = gate.training.model
    assert (gate.shape.layers, gate.shape.kv_heads) == (model.layers, model.kv_heads)
    assert gate.shape.group_size == model.query_heads // model.kv_heads
    assert path.name == f"{model.name}.fastkvzip.safetensors"
    assert all(tensor.isfinite().all() for layer in gate.layers for tensor in layer.values())


def test_the_embedded_models_gate_is_found_under_any_name_of_the_same_weights(
    loaded: LoadedModel,
) -> None:
    found = find_gate(find_shipped_gates(), replace(loaded.fingerprint, name="/models/mine"))
    assert found == find_shipped_gates() / "smollm2.fastkvzip.safetensors"
    fine_tuned = replace(loaded.fingerprint, weights_sha256="ab" * 32)
    assert find_gate(find_shipped_gates(), fine_tuned) is None
    assert find_gate(find_shipped_gates(), replace(loaded.fingerprint, weights_sha256=None)) is None


def test_a_file_that_is_no_gate_is_passed_over_and_named(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"not a gate")
    assert find_gate(tmp_path, loaded.fingerprint) is None
    assert mentions(caplog.text, "a.safetensors")
    shutil.copy(SHIPPED[0], tmp_path / "b.safetensors")
    assert find_gate(tmp_path, loaded.fingerprint) == tmp_path / "b.safetensors"


def test_the_engine_takes_the_shipped_gate_where_none_is_named(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """The profile names the gate's digest, so the engine would refuse it with any other."""
    layers = loaded.geometry.full_layers
    even = np.full((len(layers), loaded.geometry.kv_heads), 0.5)
    profile = Profile.from_statistics(
        even,
        0 * even,
        ProfileOptions(
            loaded.fingerprint, layers, scorer_spec(FastKVzip(SHIPPED[0])), "model", 32, 8
        ),
        0.5,
        Calibration(1, "equal budgets"),
    )
    profile.save(tmp_path / "profile.json")
    engine = small_engine(
        loaded, kv_retention=0.5, scorer="fastkvzip", profile=(str(tmp_path / "profile.json"),)
    )
    prompt = loaded.tokenizer.encode(HAY)[:20] * 2
    assert len(run(engine, [prompt], replace(GREEDY, max_tokens=2))[0]) == 2


def test_a_needle_is_found_in_half_the_entries(loaded: LoadedModel) -> None:
    config = EngineConfig(scorer="fastkvzip", kv_retention=0.5, kv_cache_gib=0.5)
    engine = engine_of(config, loaded)
    text = HAY * 10 + "The secret access code of Lima is 48213. " + HAY * 20
    question = "\n\nQuestion: What is the secret access code of Lima? Answer with the number only."
    prompt = engine.codec.chat_prompt([{"role": "user", "content": text + question}])
    assert len(prompt) > config.chunk_tokens, "the needle lies in a chunk that is sealed"
    assert "48213" in engine.codec.decode(run(engine, [prompt], replace(GREEDY, max_tokens=14))[0])


def test_an_evaluation_takes_the_shipped_gate(
    loaded: LoadedModel, other: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    method = Method("dynamic", 0.5, "fastkvzip", 128, "model")
    bench = ModelBench.of(EngineConfig(), loaded, [method], calibration_samples=2)
    assert bench.basis(method)["scorer_parameters"] == FastKVzip(SHIPPED[0]).parameters()
    with pytest.raises(ConfigError, match=mentioning(NONE_SHIPS)):
        ModelBench.of(EngineConfig(), other, [method], calibration_samples=2)


def test_a_model_without_a_gate_is_told_what_to_do(
    other: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=mentioning(NONE_SHIPS)):
        small_engine(other, kv_retention=0.5, scorer="fastkvzip")
    options = [
        "--load-format",
        "dummy",
        "--scorer",
        "fastkvzip",
        "-o",
        str(tmp_path / "profile.json"),
    ]
    result = CliRunner().invoke(app, ["calibrate", str(folder), *options])
    assert result.exit_code == 2 and mentions(result.output, NONE_SHIPS)


def test_a_gate_that_is_named_goes_before_the_shipped_one(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=mentioning("absent.safetensors")):
        make_scorer("fastkvzip", gate=tmp_path / "absent.safetensors", model=loaded.fingerprint)
