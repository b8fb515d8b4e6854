"""Files that are damaged, cut short or something else are refused with a sentence, before anything runs."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from tangram.errors import ModelError
from tangram.model.files import check_gguf, check_safetensors
from tangram.model.load import load_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as safetensors, without a tokenizer."""
    path = tmp_path_factory.mktemp("whole")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


def header_changed(data: bytes, change: Callable[[str], str]) -> bytes:
    size = struct.unpack("<Q", data[:8])[0]
    header = change(data[8 : 8 + size].decode()).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: b"\xff" * 4096,
        lambda data: struct.pack("<Q", 2**60) + data[8:],
        lambda data: header_changed(data, lambda text: text.rstrip()[:-5]),
        lambda data: header_changed(data, lambda text: text.replace("[32,32]", "[32,99]", 1)),
        lambda data: header_changed(data, lambda text: text.replace('"F32"', '"F99"', 1)),
        lambda data: data + b"more",
    ],
)
def test_safetensors_that_are_not_as_their_header_says(copy: Path, damage: Callable[[bytes], bytes]) -> None:
    check_safetensors(copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors' is damaged"):
        load_model(str(copy))


def test_a_model_that_lacks_a_tensor_is_not_made_up(copy: Path) -> None:
    weights = copy / "model.safetensors"
    changed = header_changed(
        weights.read_bytes(), lambda text: text.replace("layers.0.mlp.up_proj", "layers.0.mlp.upproj")
    )
    weights.write_bytes(changed)
    with pytest.raises(ModelError, match=r"lacks 1 tensors, 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        load_model(str(copy))


@pytest.mark.parametrize("content", ["", "{", "[]", '"llama"', "{}", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_config_that_is_none(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(str(copy))


def test_weights_of_another_shape_than_the_config_says(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(copy))


def test_pickled_weights_are_never_opened(copy: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return Path.touch, (tmp_path / "owned",)  # type: ignore[return-value]

    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(copy))
    assert not (tmp_path / "owned").exists()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file with two fields and one tensor."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def gguf_of(*kinds_and_counts: tuple[int, int]) -> bytes:
    """A header whose only value is an array of arrays, kinds and lengths as given."""
    head = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    return b"GGUF" + head + b"".join(struct.pack("<IQ", *one) for one in kinds_and_counts) + bytes(64)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: gguf_of((0, 2**60)), "damaged"),
        (lambda data: gguf_of((8, 2**60)), "damaged"),
        (lambda data: gguf_of(*[(9, 1)] * 3000, (0, 1)), "damaged"),
        (lambda data: gguf_of((77, 1)), "damaged"),
        (lambda data: data[:-100], "damaged"),
        (lambda data: data[:30], "damaged"),
        (lambda data: data[:4], "damaged"),
        (lambda data: b"", "no GGUF file"),
        (lambda data: b"PK\x03\x04" + data[4:], "no GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 77) + data[8:], "damaged"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "damaged"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "damaged"),
        (lambda data: data[:24] + struct.pack("<Q", 2**62) + data[32:], "damaged"),
        (lambda data: data[:24] + b"\xff" * (len(data) - 24), "damaged"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_gguf_file_that_is_not_as_its_header_says(
    gguf: bytes, damage: Callable[[bytes], bytes], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf)
    check_gguf(path)
    path.write_bytes(damage(gguf))
    with pytest.raises(ModelError, match=words):
        load_model(str(path))
    assert not list((tmp_path / "cache").rglob("*.json"))
