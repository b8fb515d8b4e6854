"""Checkpoints with quantised weights, made here by the rules of their formats: each is served with
the numbers that its weights stand for, or refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from tangram.errors import ModelError
from tangram.model import widened
from tangram.model.load import load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The sixteen numbers of E2M1, as in the OCP Microscaling formats, section 5.3.3.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_plain(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)


def change(path: Path, tensors: dict[str, Tensor], method: dict[str, Any]) -> None:
    """Replace the weights, and name the method in config.json."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def served_weights(path: Path) -> dict[str, Tensor]:
    """The weights as they are served, in maps that an engine can join, pack and round."""
    model = load_model(str(path), dtype="float32", device="cpu").model
    maps = [part for name, part in model.named_modules() if name.endswith("_proj")]
    assert maps and all(type(part) is nn.Linear for part in maps)
    return model.state_dict()


@pytest.mark.parametrize(
    ("method", "rows", "columns"),
    [
        pytest.param("fp8", 128, 128, id="as DeepSeek and Qwen publish it"),
        pytest.param("mxfp8", 1, 32, id="of the OCP Microscaling formats"),
    ],
)
def test_blocks_of_fp8(
    method: str, rows: int, columns: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_plain(LlamaConfig(**SHAPE), tokenizer, tmp_path)
    stored, meant = {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if name.endswith("_proj.weight"):
            blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            kept = scale[:, 0, :, 0].contiguous()
            if method == "mxfp8":  # scales are powers of two: the exponent and 127
                kept = kept.log2().ceil().add(127).to(torch.uint8)
                scale = (kept.float() - 127).exp2()[:, None, :, None]
            stored[name] = (blocks / scale).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = kept
            halves = stored[name].float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            meant[name] = (halves * scale).flatten(0, 1).flatten(1)
    how = {"quant_method": method, "activation_scheme": "dynamic"}
    change(tmp_path, stored, how | {"weight_block_size": [rows, columns]})
    found = served_weights(tmp_path)
    for name, weight in meant.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


GROUP = 128  # inputs that share a scale of 4 bits
# llm-compressor's formats, each with how its weights are described.
COMPRESSED: dict[str, dict[str, Any]] = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
}


def compress(name: str, weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint has of a weight [N, K] in `form`, and the weight that this means."""
    if form == "pack-quantized":
        groups = weight.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(2, keepdim=True) / 7
        numbers = (groups / scale).round()
        places = (numbers.flatten(1).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        words = places.sum(2)  # the first number in the lowest bits
        packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        stored = {"packed": packed, "scale": scale[..., 0], "shape": torch.tensor(weight.shape)}
        return {f"{name}_{part}": kept for part, kept in stored.items()}, (numbers * scale).flatten(
            1
        )
    most, dtype = (127, torch.int8) if form == "int-quantized" else (448, torch.float8_e4m3fn)
    scale = weight.abs().amax(1, keepdim=True) / most
    halves = weight / scale
    kept = (halves.round() if form == "int-quantized" else halves).to(dtype)
    return {name: kept, f"{name}_scale": scale}, kept.float() * scale


def compressed_tensors(path: Path, form: str) -> dict[str, Tensor]:
    """Weights in llm-compressor's format `form`. Returns what they mean."""
    stored, meant = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if name.endswith("_proj.weight"):
            del stored[name]
            kept, meant[name] = compress(name, weight, form)
            stored |= kept
    group = {"targets": ["Linear"], "weights": COMPRESSED[form] | {"symmetric": True}}
    method = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    change(path, stored, method)
    return meant


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_tensors(form: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    save_plain(LlamaConfig(**SHAPE), tokenizer, tmp_path)
    meant = compressed_tensors(tmp_path, form)
    found = served_weights(tmp_path)
    for name, weight in meant.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


def test_compressed_tensors_without_their_package_are_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_plain(LlamaConfig(**SHAPE), tokenizer, tmp_path)
    compressed_tensors(tmp_path, "int-quantized")
    monkeypatch.setattr(widened, "find_spec", lambda package: None)
    with pytest.raises(ModelError, match="pip install compressed-tensors"):
        load_model(str(tmp_path), device="cpu")


def test_mxfp4_of_gpt_oss(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    experts, layer = 4, "model.layers.0.mlp.experts"
    config = GptOssConfig(**SHAPE, num_local_experts=experts, num_experts_per_tok=2)
    save_plain(config, tokenizer, tmp_path)
    stored, meant = load_file(tmp_path / "model.safetensors"), {}
    for name in ("gate_up_proj", "down_proj"):
        _, columns, rows = stored.pop(f"{layer}.{name}").shape
        halves = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        powers = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        stored[f"{layer}.{name}_blocks"], stored[f"{layer}.{name}_scales"] = halves, powers
        low, high = E2M1[(halves & 15).long()], E2M1[(halves >> 4).long()]
        numbers = (
            torch.stack((low, high), -1).flatten(-2) * 2.0 ** (powers.float() - 127)[..., None]
        )
        meant[f"{layer}.{name}"] = numbers.flatten(-2).transpose(1, 2)
    change(tmp_path, stored, {"quant_method": "mxfp4"})
    found = served_weights(tmp_path)
    for name, weight in meant.items():
        torch.testing.assert_close(found[name], weight)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    ],
    ids=lambda method: method["quant_method"],
)
def test_other_methods_are_refused_by_name(
    method: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_plain(LlamaConfig(**SHAPE), tokenizer, tmp_path)
    change(tmp_path, load_file(tmp_path / "model.safetensors"), method)
    reason = (
        f"quant_method is '{method['quant_method']}', which (is read by gptqmodel|keeps weights)"
    )
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path), device="cpu")
