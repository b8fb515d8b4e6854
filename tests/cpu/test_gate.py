"""The gate files of Fast KVzip: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from tangram.compress.scorers.base import ChunkView
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tests.support import GREEDY, profile_file, run, small_engine

# 2 layers, hidden size 48, 2 KV heads, 3 query heads for each.
GATE = Path(__file__).parents[1] / "fixtures" / "kvpress" / "gate.pt"
CHUNK = 32


def no_rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 16), torch.zeros(len(positions), 16)


def a_chunk() -> ChunkView:
    hidden = torch.randn(CHUNK, 48, generator=torch.Generator().manual_seed(0))
    keys = torch.zeros(2, CHUNK, 16)
    return ChunkView(torch.zeros(6, CHUNK, 16), keys, keys, 0, 1, 0.25, no_rotary, hidden)


def test_another_gate_has_other_parameters(tmp_path: Path) -> None:
    layers = torch.load(GATE, weights_only=True)["module"]
    layers[1]["b"] += 1
    torch.save({"module": layers}, tmp_path / "other.pt")
    assert FastKVzip(tmp_path / "other.pt").parameters() != FastKVzip(GATE).parameters()


def test_a_safetensors_gate_is_the_same_gate(tmp_path: Path) -> None:
    layers = torch.load(GATE, weights_only=True)["module"]
    save_file({f"{n}.{k}": v for n, layer in enumerate(layers) for k, v in layer.items()}, tmp_path / "g.safetensors")
    chunk = a_chunk()
    assert torch.equal(FastKVzip(tmp_path / "g.safetensors").score(chunk), FastKVzip(GATE).score(chunk))


def broken_gates() -> dict[str, tuple[Callable[[list[dict[str, Tensor]]], object], str]]:
    return {
        "missing": (lambda layers: layers[1].pop("q_norm.weight"), r"layer 1 .*missing \['q_norm.weight'\]"),
        "unknown": (lambda layers: layers[0].update(extra=torch.ones(1)), r"layer 0 .*unknown \['extra'\]"),
        "rows": (lambda layers: layers[1].update({"k_proj.weight": torch.ones(8, 48)}),
                 r"layer 1 has k_proj.weight of shape \[8, 48\], it must be \[16, 48\]"),
        "dimensions": (lambda layers: layers[0].update(k_base=torch.ones(2, 4, 8)), r"k_base of shape \[2, 4, 8\]"),
        "empty": (lambda layers: layers.clear(), "holds no layers"),
    }  # fmt: skip


@pytest.mark.parametrize("case", broken_gates())
def test_a_broken_gate_is_refused_by_name(tmp_path: Path, case: str) -> None:
    damage, message = broken_gates()[case]
    layers = [dict(layer) for layer in torch.load(GATE, weights_only=True)["module"]]
    damage(layers)
    torch.save({"module": layers}, tmp_path / "gate.pt")
    with pytest.raises(ConfigError, match=message):
        FastKVzip(tmp_path / "gate.pt")


class Malice:
    """Unpickles into a call."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (eval, ("1 / 0",))


@pytest.mark.parametrize("name", ["gate.pt", "gate.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a gate", GATE.read_bytes()[:5000]], ids=["empty", "text", "cut"])
def test_a_file_that_is_no_gate_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a Fast KVzip gate"):
        FastKVzip(tmp_path / name)


def test_a_gate_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"module": [Malice()]}, tmp_path / "gate.pt")
    with pytest.raises(ConfigError, match="cannot be read as a Fast KVzip gate"):
        FastKVzip(tmp_path / "gate.pt")


def test_the_engine_compresses_by_a_gate(adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path) -> None:
    """The gate reads the block's input: it must reach the scorer, for prompts and for decode-completed chunks alike."""
    config = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    loaded = adopt_tiny(config)
    options = {"kv_retention": 0.5, "scorer": "fastkvzip", "gate": str(GATE)}
    profile = profile_file(loaded, tmp_path, scorer="fastkvzip", gate=GATE)
    engine = small_engine(loaded, **options, profile=(profile,))
    prompts = [[(7 * i) % 90 + 3 for i in range(70)], list(range(3, 93))]
    answers = run(engine, prompts, replace(GREEDY, max_tokens=40))
    assert answers != run(small_engine(loaded), prompts, replace(GREEDY, max_tokens=40))
    for prompt, answer in zip(prompts, answers, strict=True):
        longer = prompt + answer[:38]  # past the next chunk, which decode completed above and a prefill completes here
        again = small_engine(loaded, **options, profile=(profile,))
        assert run(again, [longer], replace(GREEDY, max_tokens=2))[0] == answer[38:]


def test_a_missing_gate_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        FastKVzip(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(CHUNK, 64)}, "hidden size 48, the model has 64"),
        ({"keys": torch.ones(3, CHUNK, 16)}, "KV heads 2, the model has 3"),
        ({"queries": torch.ones(2, CHUNK, 16)}, "query heads per KV head 3, the model has 1"),
        ({"layer": 2}, "2 layers, the model has at least 3"),
    ],
)
def test_a_gate_of_another_model_is_refused(change: dict[str, object], message: str) -> None:
    chunk = replace(a_chunk(), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        FastKVzip(GATE).score(chunk)
