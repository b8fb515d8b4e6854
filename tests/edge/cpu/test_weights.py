"""The count of a model's parameters from its config.json, beside models that
Transformers builds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

from tangram.cli import app
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.config_json import read_config
from tangram.sizing.kv_shape import presets, read_shape
from tangram.sizing.weight_size import read_weights
from tests.mentions import mentioning, mentions

COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 5000,
    "pad_token_id": 0,
}
GQA = {**COMMON, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1500}
MOE = {**GQA, "moe_intermediate_size": 300}
OLD = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 5000}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "glm4", "cohere"),
        GQA,
    ),
    **dict.fromkeys(("phi3", "granite", "starcoder2", "smollm3", "stablelm"), GQA),
    "gpt2": OLD,
    "gptj": {**OLD, "rotary_dim": 32},
    "gpt_bigcode": OLD,
    "gpt_neox": {**COMMON, "intermediate_size": 2048},
    "opt": {**COMMON, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 8, "vocab_size": 5000},
    "falcon": {**COMMON, "multi_query": True},
    "mixtral": {**GQA, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 8, "decoder_sparse_step": 2},
    "qwen2_moe": {
        **MOE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 700,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {**GQA, "num_local_experts": 4},
    "deepseek_v3": {
        **COMMON,
        "intermediate_size": 1500,
        "moe_intermediate_size": 300,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
}
PUBLISHED = {  # in billions, as their makers say; of gemma-3-12b the language part
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "qwen3-4b": 4.02,
    "qwen3-32b": 32.76,
    "mistral-large-2": 122.61,
    "deepseek-v3": 671.03,
    "kimi-k2": 1026.4,
    "gemma-3-12b": 11.77,
    "gpt-oss-20b": 20.91,
    "smollm2": 0.1345,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_is_that_of_the_model_that_transformers_builds(
    family: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert read_weights(read_config(tmp_path)).parameters == pytest.approx(theirs, rel=0.01)
    shape = read_shape(tmp_path)
    assert len(shape.windows) == 4 and (shape.latent or shape.kv_heads == model_kv_heads(config))


def model_kv_heads(config: Any) -> int:
    if config.model_type in ("falcon", "gpt_bigcode"):
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("name", presets())
def test_presets_have_as_many_parameters_as_was_published(name: str) -> None:
    assert read_weights(read_config(name)).parameters / 1e9 == pytest.approx(
        PUBLISHED[name], rel=0.002
    )


def test_files_at_hand_are_counted_and_not_reckoned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**GQA, "model_type": "llama", "dtype": "float16"})
    )
    names = ["model-1.safetensors", "model-2.safetensors"]
    save_file({"a": torch.zeros(10, 7), "b": torch.zeros(3)}, tmp_path / names[0])
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(read_config(tmp_path)).source == "config.json", "one file is missing"
    save_file({"c": torch.zeros(5)}, tmp_path / names[1])
    found = read_weights(read_config(tmp_path))
    assert (found.parameters, found.bytes, found.dtype, found.source) == (
        78,
        156,
        "float16",
        "safetensors",
    )
    assert read_weights(read_config(tmp_path), "float32").bytes == 312
    (tmp_path / names[1]).write_bytes(b"\0" * 8)
    with pytest.raises(ConfigError, match=mentioning(f"{tmp_path} safetensors")):
        read_weights(read_config(tmp_path))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["size", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    return result.exit_code, " ".join(result.output.split())


def test_size_takes_the_weights_off_and_counts_sequences_and_tokens() -> None:
    whole = ("--memory-gib", "80", "--kv-retention", "1")
    code, said = run("llama-3.1-8b", "--context-tokens", "32000", *whole, "--json")
    found = json.loads(said)
    assert code == 0 and found["weights_bytes"] == 2 * found["parameters"]
    # 80 GiB less 14.96 hold 16 caches of 3.91, and parts of one more.
    assert (found["sequences"], found["tokens"]) == (16, 16 * 32_000)
    assert 16 * 32_000 < found["capacity_tokens"] < 17 * 32_000
    half = json.loads(run("llama-3.1-8b", "--memory-gib", "80", "--json")[1])
    assert 31 <= half["sequences"] <= 33 and half["kv_retention"] == EngineConfig.kv_retention
    assert "kv_retention 0.5" in " ".join(run("llama-3.1-8b")[1].split())
    _, table = run("llama-3.1-8b", *whole)
    for words in ("8.03 B parameters in bfloat16", "14.96 GiB", "65.04 GiB", "512,000"):
        assert words in table
    none = json.loads(run("llama-3.1-70b", "--memory-gib", "80", "--json")[1])
    assert (none["sequences"], none["capacity_tokens"]) == (0, 0)


def test_size_knows_its_old_names_for_dtypes() -> None:
    both = [
        json.loads(run("qwen3-4b", "--json", *given)[1])
        for given in (["--dtype", "fp8"], ["--kv-cache-dtype", "fp8"])
    ]
    assert (
        both[0] == both[1]
        and both[0]["kv_cache_dtype"] == "fp8"
        and both[0]["weights_dtype"] == "bfloat16"
    )
    integers = json.loads(run("qwen3-4b", "--json", "--kv-cache-dtype", "int8")[1])
    assert integers == both[0] | {"kv_cache_dtype": "int8"}
    assert run("qwen3-4b", "--json", "--dtype", "fp32") == run(
        "qwen3-4b", "--json", "--dtype", "float32"
    )
    code, said = run("qwen3-4b", "--dtype", "int4")
    assert code == 2 and mentions(said, "dtype 'int4' auto float32 bfloat16 float16")


def test_a_model_on_the_hub_is_read_from_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(model: str, revision: None, allow_patterns: list[str]) -> str:
        asked.append((model, *allow_patterns))
        (tmp_path / allow_patterns[0]).write_text(
            json.dumps({**GQA, "model_type": "llama", "tie_word_embeddings": False})
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    code, said = run("somebody/some-model", "--json")
    found = json.loads(said)
    assert code == 0 and asked == [("somebody/some-model", "config.json")]
    assert found["model"] == "somebody/some-model" and found["weights_source"] == "config.json"


def test_without_a_network_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["size", "somebody/there-is-no-such-model"])
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert mentions(result.output, "somebody/there-is-no-such-model Hugging config.json")


def test_unknown_weights_are_said_and_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4})
    )
    code, said = run(str(path))
    assert code == 0 and mentions(said, "weights vocab_size")
    code, said = run(str(path), "--memory-gib", "8")
    assert code == 2 and mentions(said, "memory_gib 8.0 vocab_size")
