"""The papers' experiments end to end, on a tiny shape: what they keep and show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.serving import agents, competitors, paper
from tangram.kernels.triton.card import INTERPRETED
from tangram.types import Geometry

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
ON_A_CPU = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--batched-tokens", "1024"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shapes that has a tiny one, and a cache of its own for what is calibrated."""
    (tmp_path / "tiny").mkdir()
    config = json.loads((competitors.MODEL / "config.json").read_text()) | TINY
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    for module in (agents, competitors, paper):
        monkeypatch.setattr(module, "MODELS", tmp_path)
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_engines_of_the_paper_answer_the_same_load(tiny: Path) -> None:
    paper.main(
        [
            *ON_A_CPU,
            *("--engines", "full,static-0.25,fp8-0.25", "--kv-cache-gib", "0.05"),
            *("--requests", "2", "--input-tokens", "600", "--output-tokens", "4", "--batch", "2"),
            *("--rated-requests", "2", "--rated-tokens", "700", "--rates", "20", "-o", str(tiny)),
        ]
    )
    kept: dict[str, Any] = json.loads((tiny / "paper_tiny.json").read_text())["engines"]
    assert list(kept) == ["full", "static-0.25", "fp8-0.25"]
    assert all(engine["runs"][0]["output_tokens"] == 8 for engine in kept.values())
    fits = {name: engine["capacity_tokens"] for name, engine in kept.items()}
    assert fits["full"] < fits["static-0.25"] < fits["fp8-0.25"]
    assert [name for name in kept if "rates" in kept[name]] == list(kept)[:2]
    assert [name for name in kept if "breakdown" in kept[name]] == ["static-0.25", "fp8-0.25"]


def test_agents_share_what_they_have_in_common(tiny: Path) -> None:
    agents.main(
        [
            *ON_A_CPU,
            *("--kv-cache-gib", "0.05", "--sizes", "512", "64", "32", "16", "--rates", "40"),
            *("--seconds", "0.6", "--decoding", "16", "--output-tokens", "4", "-o", str(tiny)),
        ]
    )
    content = json.loads((tiny / "agents_tiny.json").read_text())
    assert list(content["engines"]) == ["packed", "apart"]
    for engine in content["engines"].values():
        rated = engine["rates"]["40"]
        assert rated["requests"] == 24 and rated["cached_share"] > 0.8


def test_loads_are_multiples_of_the_distinct_entries() -> None:
    """16 agents of 1,024 + 256 + 64 + 16 tokens, 4 tools' texts and 16 histories."""
    shape = Geometry(1, 2, 4, 64, 100, 4096, (None,))
    loads = agents.count_loads(shape, (1024, 256, 64, 16), 16, replace(INTERPRETED, processors=132))
    distinct = 1024 + 4 * 256 + 16 * 64 + 16 * 16
    assert loads["apart"] == pytest.approx(16 * (1024 + 256 + 64 + 16) / distinct)
    assert 1.0 <= loads["packed"] < loads["apart"]


def test_tokens_differ_in_their_experts_under_weights_as_vllm_draws_them() -> None:
    """24 layers that add their biases, and products too small to count, to what tokens are."""
    torch.manual_seed(0)
    hidden, experts, tokens = 2880, 32, 64

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).uniform_(-1e-3, 1e-3)

    layers = torch.nn.ModuleList(torch.nn.Linear(hidden, experts) for _ in range(24))
    for layer in layers:
        layer.register_parameter("w2_bias", torch.nn.Parameter(torch.empty(hidden)))
        for parameter in layer.parameters():
            parameter.data = draw(*parameter.shape)
        layer.norm = draw(hidden)
    embedded = draw(tokens, hidden)

    def count_chosen() -> int:
        h = embedded
        for layer in layers:
            chosen = layer(torch.nn.functional.rms_norm(h, (hidden,), layer.norm)).topk(4).indices
            h = h + layer.w2_bias
        return len(chosen.unique())

    assert count_chosen() == 4
    for layer in layers:
        layer.bias.data.zero_()
    assert count_chosen() < experts / 2  # routers without biases are not enough
    competitors.clear_biases(layers)
    assert count_chosen() == experts


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        paper.main(["--engines", "full,fastest", "-o", str(tmp_path)])
