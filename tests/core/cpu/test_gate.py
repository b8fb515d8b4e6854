"""The gate files of Fast KVzip: what is read, and what is refused by name."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import ModelFingerprint, Profile
from tangram.compress.scorers.base import ChunkView
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import find_gate, load_gate
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.model.sealing import GroupSealer
from tests.mentions import mentioning
from tests.small_engines import GREEDY, profile_file, run, sealed_state, small_engine

# 2 layers, hidden size 48, 2 KV heads, 3 query heads for each.
GATE = Path(__file__).parents[2] / "fixtures" / "kvpress" / "gate.safetensors"
PAGE = Path(__file__).parents[3] / "docs" / "scorers.md"
CHUNK = 32


def gate_layers() -> list[dict[str, Tensor]]:
    """The tensors of `GATE`, layer by layer."""
    layers: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in load_file(GATE).items():
        layer, _, rest = name.partition(".")
        layers[int(layer)][rest] = tensor
    return layers


def save_layers(layers: list[dict[str, Tensor]], path: Path) -> None:
    save_file(
        {f"{n}.{name}": tensor for n, layer in enumerate(layers) for name, tensor in layer.items()},
        path,
    )


def no_rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 16), torch.zeros(len(positions), 16)


def a_chunk() -> ChunkView:
    hidden = torch.randn(CHUNK, 48, generator=torch.Generator().manual_seed(0))
    keys = torch.zeros(2, CHUNK, 16)
    return ChunkView(torch.zeros(6, CHUNK, 16), keys, keys, 0, 1, 0.25, no_rotary, hidden)


def test_another_gate_has_other_parameters(tmp_path: Path) -> None:
    layers = gate_layers()
    layers[1]["b"] += 1
    save_layers(layers, tmp_path / "other.safetensors")
    assert FastKVzip(tmp_path / "other.safetensors").parameters() != FastKVzip(GATE).parameters()


def test_a_gate_that_serves_does_not_change_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    path.write_bytes(GATE.read_bytes())
    scorer, size = FastKVzip(path), path.stat().st_size
    before = scorer.score(a_chunk()).clone()
    with path.open("r+b") as file:  # the same file, as `cp` writes it
        file.seek(size // 2)
        file.write(b"\1" * (size // 2))
    assert torch.equal(scorer.score(a_chunk()), before)


def test_a_gate_of_some_heads_scores_as_the_whole_gate_scores_them() -> None:
    """On several devices each has the heads that were dealt to it, here others in each layer."""
    chunk, whole = a_chunk(), FastKVzip(GATE)
    heads = np.array([[0], [1]])
    own = whole.of_heads(heads)
    part = replace(chunk, queries=chunk.queries[3:], keys=chunk.keys[1:], values=chunk.values[1:])
    assert torch.allclose(own.score(part), whole.score(chunk)[1:], atol=1e-6)
    assert own.parameters() == whole.parameters()
    assert whole.score(chunk).shape == (2, CHUNK)


def test_a_released_gate_is_converted_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those files carry NumPy's numbers of the training run beside the tensors."""
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"module": gate_layers(), "losses": np.ones(3), "rates": np.ones(3, np.float32)}, "gate.pt"
    )
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "gate.pt" in block
    ]
    exec(code, {})
    chunk = a_chunk()
    assert torch.equal(
        FastKVzip(Path("gate.safetensors")).score(chunk), FastKVzip(GATE).score(chunk)
    )


def broken_gates() -> dict[str, tuple[Callable[[list[dict[str, Tensor]]], object], str]]:
    return {
        "missing": (lambda layers: layers[1].pop("q_norm.weight"), "layer 1 ['q_norm.weight']"),
        "unknown": (lambda layers: layers[0].update(extra=torch.ones(1)), "layer 0 ['extra']"),
        "rows": (
            lambda layers: layers[1].update({"k_proj.weight": torch.ones(8, 48)}),
            "layer 1 k_proj.weight [8, 48], [16, 48]",
        ),
        "dimensions": (
            lambda layers: layers[0].update(k_base=torch.ones(2, 4, 8)),
            "k_base [2, 4, 8]",
        ),
        "empty": (lambda layers: layers.clear(), "layers"),
    }


@pytest.mark.parametrize("case", broken_gates())
def test_a_broken_gate_is_refused_by_name(tmp_path: Path, case: str) -> None:
    damage, message = broken_gates()[case]
    layers = gate_layers()
    damage(layers)
    save_layers(layers, tmp_path / "gate.safetensors")
    with pytest.raises(ConfigError, match=mentioning(message)):
        FastKVzip(tmp_path / "gate.safetensors")


class Malice:
    """Unpickles into a call."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (eval, ("1 / 0",))


@pytest.mark.parametrize(
    "content", [b"", b"not a gate", GATE.read_bytes()[:5000]], ids=["empty", "text", "cut"]
)
def test_a_file_that_is_no_gate_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gate.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=mentioning(f"{tmp_path}/gate.safetensors")):
        FastKVzip(tmp_path / "gate.safetensors")


@pytest.mark.parametrize("name", ["gate.pt", "gate.safetensors"])
@pytest.mark.parametrize("content", [[], [Malice()]], ids=["tensors", "malice"])
def test_a_pickle_is_not_opened_and_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: list[object]
) -> None:
    torch.save({"module": content or gate_layers()}, tmp_path / name)
    monkeypatch.setattr(pickle, "Unpickler", pytest.fail)
    monkeypatch.setattr(torch, "load", pytest.fail)
    with pytest.raises(ConfigError, match=mentioning("safetensors docs/scorers.md")):
        FastKVzip(tmp_path / name)


@pytest.mark.parametrize("name", ["b", "first.b", "1.b", "-1.b"])
def test_tensors_of_no_layer_are_refused(tmp_path: Path, name: str) -> None:
    save_file({name: torch.ones(1)}, tmp_path / "gate.safetensors")
    with pytest.raises(ConfigError, match=mentioning(f"{tmp_path}/gate.safetensors")):
        FastKVzip(tmp_path / "gate.safetensors")


GATED = Qwen3Config(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    eos_token_id=2,
)


def test_the_engine_compresses_by_a_gate(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    """The gate reads the block's input: it must reach the scorer, for prompts and for
    decode-completed chunks alike.
    """
    loaded = adopt_tiny(GATED)
    options = {"kv_retention": 0.5, "scorer": "fastkvzip", "gate": str(GATE)}
    profile = profile_file(loaded, tmp_path, scorer="fastkvzip", gate=GATE)
    engine = small_engine(loaded, **options, profile=(profile,))
    prompts = [[(7 * i) % 90 + 3 for i in range(70)], list(range(3, 93))]
    answers = run(engine, prompts, replace(GREEDY, max_tokens=40))
    assert answers != run(small_engine(loaded), prompts, replace(GREEDY, max_tokens=40))
    for prompt, answer in zip(prompts, answers, strict=True):
        # Past the next chunk, which decode completed above and a prefill completes here
        longer = prompt + answer[:38]
        again = small_engine(loaded, **options, profile=(profile,))
        assert run(again, [longer], replace(GREEDY, max_tokens=2))[0] == answer[38:]


def test_chunks_that_are_scored_together_keep_what_each_keeps_alone(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, together = adopt_tiny(GATED), list[int]()
    take = GroupSealer.take

    def note(sealer: GroupSealer, *arguments: Any, **named: Any) -> None:
        together.append(sealer.rows.stop - sealer.rows.start)
        take(sealer, *arguments, **named)

    monkeypatch.setattr(GroupSealer, "take", note)
    profile = profile_file(loaded, tmp_path, scorer="fastkvzip", gate=GATE)
    options: dict[str, Any] = {
        "kv_retention": 0.5,
        "scorer": "fastkvzip",
        "gate": str(GATE),
        "profile": (profile,),
    }
    prompts = [[(7 * i + j) % 90 + 3 for i in range(140)] for j in range(3)]
    sealed = []
    for chunks in (1, 8):
        engine = small_engine(
            loaded, **options, max_num_seqs=3, max_num_batched_tokens=chunks * CHUNK + 3
        )
        run(engine, prompts, replace(GREEDY, max_tokens=2))
        sealed.append(sealed_state(engine))
        assert (max(together) > 1) == (chunks > 1)
    alone, grouped = sealed
    assert len(alone) == 3 * (140 // CHUNK)
    assert alone.keys() == grouped.keys()
    assert all(torch.equal(alone[key], grouped[key]) for key in alone)


def test_published_budgets_are_imported_for_a_gate(tmp_path: Path) -> None:
    published, profile = tmp_path / "published.npz", tmp_path / "profile.json"
    prefix, shares = "gpt-oss-20b/fastkvzip/layer", np.random.default_rng(0).random((12, 8)) * 0.2
    arrays = {
        f"{prefix}/mean": shares,
        f"{prefix}/std": 0 * shares,
        f"{prefix}/layers": np.arange(1, 24, 2),
    }
    np.savez(published, **arrays)  # type: ignore[arg-type]
    options = [
        "--import",
        str(published),
        "--scorer",
        "fastkvzip",
        "--scope",
        "layer",
        "-o",
        str(profile),
    ]
    result = CliRunner().invoke(app, ["calibrate", "gpt-oss-20b", *options, "--gate", str(GATE)])
    assert result.exit_code == 0, result.output
    assert dict(Profile.load(profile).scorer.parameters) == FastKVzip(GATE).parameters()


def test_a_missing_gate_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentioning(f"{tmp_path}/nowhere.safetensors")):
        FastKVzip(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(CHUNK, 64)}, "hidden 48 64"),
        ({"keys": torch.ones(3, CHUNK, 16)}, "KV 2 3"),
        ({"queries": torch.ones(2, CHUNK, 16)}, "query 3 1"),
        ({"layer": 2}, "layers 2 3"),
    ],
)
def test_a_gate_of_another_model_is_refused(change: dict[str, object], message: str) -> None:
    chunk = replace(a_chunk(), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=mentioning(message)):
        FastKVzip(GATE).score(chunk)


def test_nobody_waits_for_a_gate_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate.safetensors")
    with pytest.raises(ConfigError, match=mentioning(f"{tmp_path}/gate.safetensors regular")):
        load_gate(tmp_path / "gate.safetensors")
    assert find_gate(tmp_path, ModelFingerprint("m", "llama", 1, 1, 1, 8)) is None
