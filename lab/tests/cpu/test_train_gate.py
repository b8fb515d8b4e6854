"""Gates of one's own: they keep what KVzip would keep, they are the same every time, and serve
their model alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3Config
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import Gate, GateShape, load_gate, save_gate
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram_lab.gate_training.fit import Examples, Recipe, new_weights, overlap, train_gate
from tangram_lab.gate_training.text_training import agreements, train_gate_on_texts
from tests.core.cpu.test_purity import TINY_LATENT
from tests.mentions import mentioning, mentions
from tests.small_engines import GREEDY, profile_file, run, small_engine

CHUNK = 64
RECIPE = Recipe(epochs=12, batch_tokens=64, learning_rate=1e-2, head_dim=8, sinks=4)
WORDS = (
    "the old harbour keeps a lantern that nobody lights and a map which shows where boats go "
    "at night"
)
# Few words: a random model has no more to say about a token than which one it is.
TEXTS = [" ".join(random.Random(number).choices(WORDS.split(), k=400)) for number in range(8)]


def config(**changes: int) -> Qwen3Config:
    return Qwen3Config(
        **(
            {
                "vocab_size": 49_152,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 512,
                "eos_token_id": 2,
            }
            | changes
        )
    )


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(config())


def train_here(loaded: LoadedModel, **changes: int) -> tuple[Gate, list[list[int]]]:
    recipe = replace(RECIPE, **changes)
    return train_gate_on_texts(
        loaded, TEXTS, chunk_tokens=CHUNK, source="calibration texts", recipe=recipe
    )


@pytest.fixture(scope="module")
def taught(tiny: LoadedModel) -> tuple[Gate, list[list[int]]]:
    return train_here(tiny)


def test_a_trained_gate_keeps_what_kvzip_would_keep(
    tiny: LoadedModel, taught: tuple[Gate, list[list[int]]]
) -> None:
    """On text it has not seen: far better than one that was not trained, and than chance, which
    keeps a share of ρ.
    """
    gate, unseen = taught
    generator = torch.Generator().manual_seed(1)
    fresh = replace(gate, layers=tuple(new_weights(gate.shape, generator) for _ in gate.layers))
    trained, untrained = (
        agreements(tiny, entry, unseen, chunk_tokens=CHUNK) for entry in (gate, fresh)
    )
    assert [(found.retention, found.scope) for found in trained] == [
        (0.3, "model"),
        (0.5, "model"),
        (0.3, None),
        (0.5, None),
    ]
    for ours, theirs in zip(trained, untrained, strict=True):
        assert ours.gate > max(theirs.gate, ours.retention) + 0.1, (ours, theirs)
        assert ours.keydiff == theirs.keydiff


def test_the_file_holds_the_gate_and_where_it_is_from(
    taught: tuple[Gate, list[list[int]]], tmp_path: Path
) -> None:
    gate, _ = taught
    save_gate(tmp_path / "gate.safetensors", gate)
    again = load_gate(tmp_path / "gate.safetensors")
    assert again.shape == gate.shape == GateShape(2, 48, 2, 3, 8, 4)
    assert again.training == gate.training is not None
    assert (gate.training.samples, gate.training.chunk_tokens, gate.training.teacher.name) == (
        7,
        CHUNK,
        "kvzip",
    )
    hidden = torch.randn(CHUNK, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.score(1, hidden), gate.score(1, hidden))
    assert list(tmp_path.iterdir()) == [tmp_path / "gate.safetensors"]


def test_the_same_seed_gives_the_same_file_and_another_seed_another(
    tiny: LoadedModel, taught: tuple[Gate, list[list[int]]], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("first", "again", "other")]
    for path, gate in zip(
        paths, (taught[0], train_here(tiny)[0], train_here(tiny, seed=1)[0]), strict=True
    ):
        save_gate(path, gate)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


def test_the_engine_serves_its_model_by_it_and_refuses_another(
    tiny: LoadedModel,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    taught: tuple[Gate, list[list[int]]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "gate.safetensors"
    save_gate(path, taught[0])
    profile = profile_file(tiny, tmp_path, scorer="fastkvzip", gate=path)
    options = {"kv_retention": 0.5, "scorer": "fastkvzip", "gate": str(path), "profile": (profile,)}
    assert (
        len(
            run(small_engine(tiny, **options), [list(range(3, 90))], replace(GREEDY, max_tokens=4))[
                0
            ]
        )
        == 4
    )
    # The shape is the same, and so are all sizes a gate depends on: only the fingerprint tells them
    # apart.
    other = adopt_tiny(config(vocab_size=49_000))
    with pytest.raises(ConfigError, match=mentioning("vocab_size 49152 49000")):
        small_engine(other, **options)


def test_layers_that_are_not_compressed_get_a_gate_too(tiny: LoadedModel) -> None:
    """The format numbers all layers; one without examples, a sliding window, is there but was not
    trained.
    """
    examples = Examples(1, CHUNK, RECIPE)
    examples.hidden[1] = torch.randn(
        CHUNK, 48, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    examples.scores[1] = torch.rand(2, CHUNK, generator=torch.Generator().manual_seed(1))
    gate = train_gate(examples, tiny.geometry, torch.device("cpu"))
    assert len(gate.layers) == 2
    assert not gate.layers[0]["b"].any() and gate.layers[1]["b"].any()


def test_memory_is_bounded_by_the_recipe() -> None:
    few = Examples(chunks=10, chunk_tokens=512, recipe=replace(RECIPE, most_tokens=1_000))
    assert (few.tokens_per_chunk, few.tokens) == (100, 1_000)
    assert Examples(chunks=2, chunk_tokens=512, recipe=RECIPE).tokens == 1_024


def test_overlap_counts_what_is_kept_alike() -> None:
    theirs = torch.tensor([[[8.0, 7.0, 2.0, 1.0]], [[6.0, 5.0, 4.0, 3.0]]])
    ours = torch.tensor([[[8.0, 7.0, 6.0, 5.0]], [[1.0, 2.0, 3.0, 4.0]]])
    # Theirs keep 8 7 6 5, ours the first head alone
    assert overlap(ours, theirs, 0.5, "model") == 0.5
    assert overlap(ours, theirs, 0.5, None) == 0.5  # all of the first head, none of the second
    assert overlap(ours, theirs, 0.25, None) == 0.5
    assert overlap(theirs, theirs, 0.25, "layer") == 1.0


@pytest.mark.parametrize(
    ("texts", "message"), [(TEXTS[:1], "texts 1 2"), (["short"] * 2, "sample 0 1 tokens")]
)
def test_texts_that_are_not_enough_are_refused(
    tiny: LoadedModel, texts: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=mentioning(message)):
        train_gate_on_texts(tiny, texts, chunk_tokens=CHUNK, source="", recipe=RECIPE)


def test_a_batch_must_fill(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=mentioning("2688 2689")):
        train_here(tiny, batch_tokens=2_689)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-gate", "nowhere/gate.safetensors"], "train_gate nowhere/gate.safetensors"),
        (["--train-gate", "gate.pt"], "train_gate gate.pt .safetensors"),
        (["--train-gate", "gate.safetensors", "-o", "profile.json"], "--output profile.json"),
        (["--train-gate", "gate.safetensors", "--scorer", "tova"], "--scorer tova"),
        (["--train-gate", "gate.safetensors", "--scorer", "keydiff"], "--scorer keydiff"),
        (["--train-gate", "gate.safetensors", "--kv-retention", "0.3"], "--kv-retention 0.3"),
        (["--train-gate", "gate.safetensors", "--scope", "layer"], "--scope layer"),
        (["--train-gate", "gate.safetensors", "--page-tokens", "8"], "--page-tokens 8"),
        (["--train-gate", "gate.safetensors", "--heads-per-page", "2"], "--heads-per-page 2"),
        (
            ["--train-gate", "gate.safetensors", "--samples", "2", "--data", "a.txt"],
            "calibration_samples 2 data 'a.txt'",
        ),
        ([], "output"),
    ],
)
def test_the_command_refuses_at_once(
    options: list[str], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", "smollm2", *options])
    assert result.exit_code == 2
    assert mentions(result.output, message)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_gate_that_calibrate_accepts(folder: Path, tmp_path: Path) -> None:
    data, gate, profile = (
        tmp_path / "texts.jsonl",
        tmp_path / "gate.safetensors",
        tmp_path / "profile.json",
    )
    texts = [" ".join(str(37 * n * start % 290 + 3) for n in range(300)) for start in range(1, 6)]
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = ["--data", str(data), "--load-format", "dummy", "--chunk-tokens", "64"]
    made = CliRunner().invoke(app, ["calibrate", str(folder), "--train-gate", str(gate), *options])
    assert made.exit_code == 0, made.output
    assert "1 unseen texts" in " ".join(made.output.split())
    assert FastKVzip(gate).gate.training is not None
    options += [
        "--scorer",
        "fastkvzip",
        "--gate",
        str(gate),
        "-o",
        str(profile),
        "--kv-retention",
        "0.6",
    ]
    used = CliRunner().invoke(app, ["calibrate", str(folder), *options])
    assert used.exit_code == 0, used.output


def test_a_gate_learns_from_kvzip_and_serves_latents(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    """KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there."""
    loaded = adopt_tiny(DeepseekV3Config(**(TINY_LATENT.to_dict() | {"vocab_size": 49_152})))
    recipe = Recipe(epochs=1, batch_tokens=64, head_dim=8, sinks=4)
    gate, _ = train_gate_on_texts(loaded, TEXTS[:4], chunk_tokens=32, source="texts", recipe=recipe)
    assert (gate.shape.kv_heads, gate.shape.group_size) == (1, 4)
    path = tmp_path / "gate.safetensors"
    save_gate(path, gate)
    profile = profile_file(loaded, tmp_path, scorer="fastkvzip", gate=path)
    prompts = [[5, 9, 17, 3], list(range(3, 93)), [(7 * i) % 90 + 3 for i in range(150)]]
    engine = small_engine(
        loaded, kv_retention=0.5, scorer="fastkvzip", gate=str(path), profile=(profile,)
    )
    assert run(engine, prompts) != run(small_engine(loaded), prompts)
