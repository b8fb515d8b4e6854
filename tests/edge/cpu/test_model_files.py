"""Files that are damaged, cut short or something else are refused with a sentence, before anything
runs.
"""

from __future__ import annotations

import fcntl
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from tangram.cli import app
from tangram.errors import ModelError
from tangram.model.load import load_model
from tangram.model.weight_files import check_gguf, check_safetensors
from tests.mentions import mentioning, mentions


def save_llama(path: Path, positions: int) -> Path:
    """A tiny Llama in safetensors, and a tokenizer of words w0 to w63."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as safetensors."""
    return save_llama(tmp_path_factory.mktemp("whole"), positions=64)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path, dirs_exist_ok=True))


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
def test_safetensors_that_are_not_as_their_header_says(
    copy: Path, damage: Callable[[bytes], bytes]
) -> None:
    check_safetensors(copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelError, match=mentioning("model.safetensors damaged")):
        load_model(str(copy))


def test_a_model_that_lacks_a_tensor_is_not_made_up(copy: Path) -> None:
    weights = copy / "model.safetensors"
    changed = header_changed(
        weights.read_bytes(),
        lambda text: text.replace("layers.0.mlp.up_proj", "layers.0.mlp.upproj"),
    )
    weights.write_bytes(changed)
    with pytest.raises(ModelError, match=mentioning("1 'model.layers.0.mlp.up_proj.weight'")):
        load_model(str(copy))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"llama"', "{}", '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_config_that_is_none(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json|hidden_size"):
        load_model(str(copy))


@pytest.mark.parametrize(
    "field",
    [
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "head_dim",
        "vocab_size",
        "hidden_size",
    ],
)
def test_a_model_of_nothing_is_named(copy: Path, field: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {field: 0}))
    with pytest.raises(ModelError, match=rf"\b{field} is 0\b|ZeroDivisionError"):
        load_model(str(copy), load_format="dummy")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000 16777216"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"hidden_act": "softer"}, "KeyError: 'softer'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_a_config_says_of_no_model_is_named(
    changes: dict[str, object], words: str, copy: Path
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=mentioning(words)):
        load_model(str(copy))


def test_a_length_of_the_tokenizer_holds_for_nobody(copy: Path) -> None:
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))
    assert load_model(str(copy)).encode("w7") == [7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_served_does_not_change_with_its_files(dtype: str, copy: Path) -> None:
    """A mapped file would change with it."""
    weights = copy / "model.safetensors"
    if dtype != "float32":  # a dtype that has to be converted is no map of the file
        AutoModelForCausalLM.from_pretrained(copy, dtype=dtype).save_pretrained(copy)
    loaded = load_model(str(copy), dtype=dtype)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    size = weights.stat().st_size
    with weights.open("r+b") as file:  # the same file, as `cp` writes it
        file.seek(size // 2)
        file.write(b"\1" * (size // 2))
    after = loaded.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_tokenizer_of_a_larger_model_is_named_with_both_sizes(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(copy / "cache"))
    words = WordLevel({f"w{number}": number for number in range(100)}, unk_token="w99")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(copy)
    command = ["generate", str(copy), "-p", "w1", "--chunk-tokens", "32", "--scorer", "keydiff"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert mentions(refused.stderr, "tokenizer 100 64")


def test_a_model_is_loaded_where_standard_error_is_closed(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert load_model(str(copy), load_format="dummy")


def test_pickled_weights_are_never_opened(copy: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return Path.touch, (tmp_path / "owned",)  # type: ignore[return-value]

    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ModelError, match=mentioning("pytorch_model.bin safetensors")):
        load_model(str(copy))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "target", ["a.bin", "../outside.safetensors", "/etc/model.safetensors", ".safetensors", 7]
)
def test_an_index_leads_nowhere_but_to_safetensors_beside_it(copy: Path, target: object) -> None:
    (copy / "model.safetensors").rename(copy / "shard.safetensors")
    index = copy / "model.safetensors.index.json"
    names = [f"model.{name}" for name in ("embed_tokens.weight", "norm.weight")]
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors") | {names[1]: target}})
    )
    with pytest.raises(ModelError, match=mentioning(f"{index}")):
        load_model(str(copy))


def test_tensors_that_the_config_has_no_place_for_are_not_left_out(copy: Path) -> None:
    config = LlamaConfig.from_pretrained(copy)
    config.num_hidden_layers = 2
    LlamaForCausalLM(config).save_pretrained(copy)
    (copy / "config.json").write_text(
        json.dumps(json.loads((copy / "config.json").read_text()) | {"num_hidden_layers": 1})
    )
    with pytest.raises(ModelError, match=mentioning("9 'model.layers.1.input_layernorm.weight'")):
        load_model(str(copy))


def write_llama(
    path: Path,
    layers: int = 1,
    leave_out: str = "",
    also: tuple[str, ...] = (),
    stated_layers: int | None = None,
) -> Path:
    """A GGUF file of a tiny Llama with a byte-level tokenizer, which Transformers can read."""
    hidden, writer = 32, GGUFWriter(path, "llama")
    for name, number in {
        "block_count": stated_layers or layers,
        "context_length": 64,
        "embedding_length": hidden,
        "feed_forward_length": hidden,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 16,
        "vocab_size": 260,
    }.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_tokenizer_model("gpt2")
    tokens = [*bytes_to_unicode().values(), "<s>", "</s>", "<unk>", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    for name, token in (("bos", 256), ("eos", 257), ("unknown", 258), ("padding", 257)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    block = {
        "attn_q": (hidden, hidden),
        "attn_k": (16, hidden),
        "attn_v": (16, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (hidden, hidden),
        "ffn_up": (hidden, hidden),
        "ffn_down": (hidden, hidden),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    tensors = {"token_embd.weight": (260, hidden), "output_norm.weight": (hidden,)} | dict.fromkeys(
        also, (hidden,)
    )
    tensors |= {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(layers)
        for name, shape in block.items()
    }
    generator = np.random.default_rng(0)
    for name, shape in tensors.items():
        if name != leave_out:
            writer.add_tensor(name, generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where converted weights are kept during the test."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"leave_out": "blk.0.ffn_up.weight"}, "1 'model.layers.0.mlp.up_proj.weight'"),
        ({"also": ("blk.1.attn_norm.weight",)}, "1 'blk.1.attn_norm.weight'"),
        ({"also": ("blk.0.attn_q.bias",)}, "1 'blk.0.attn_q.bias'"),
        ({"also": ("rope_freqs.weight",)}, "1 'rope_freqs.weight'"),
    ],
)
def test_a_gguf_file_with_other_tensors_than_its_model_is_not_served(
    change: dict[str, object], words: str, kept: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=mentioning(words)):
        load_model(str(write_llama(tmp_path / "model.gguf", **change)))  # type: ignore[arg-type]
    assert list(kept.iterdir()) == []


def test_a_gguf_file_of_more_layers_than_any_model_is_refused_at_once(
    kept: Path, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "model.gguf", stated_layers=10**9)
    with pytest.raises(ModelError, match=mentioning("llama.block_count 1000000000 2048")):
        load_model(str(path))


def test_a_damaged_conversion_is_set_aside_and_made_anew(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write_llama(tmp_path / "model.gguf"))
    first = load_model(path).fingerprint
    (made,) = kept.iterdir()
    weights = made / "model.safetensors"
    damages: list[Callable[[], object]] = [
        (made / "config.json").unlink,
        lambda: weights.write_bytes(weights.read_bytes()[:-9]),
        weights.unlink,
        (made / "tokenizer.json").unlink,
    ]
    for number, damage in enumerate(damages, 1):
        damage()
        assert load_model(path).fingerprint == first
        assert len(list(kept.glob("*.damaged-*"))) == number
        assert "converting again" in caplog.text
        caplog.clear()
        load_model(path)
        assert not caplog.records, "it is whole again"


def test_what_killed_conversions_left_goes_with_the_next_one(kept: Path, tmp_path: Path) -> None:
    running = kept / "converting-running"
    for folder in (kept / "converting-killed", running):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    with (running / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load_model(str(write_llama(tmp_path / "model.gguf")))
    assert running.exists() and len(list(kept.iterdir())) == 2


@pytest.mark.parametrize("ends", [["a"], [2, -1], 2**40, [True]])
def test_ends_that_are_no_tokens_are_named(ends: object, kept: Path, tmp_path: Path) -> None:
    load_model(str(write_llama(tmp_path / "model.gguf")))
    (folder,) = kept.iterdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ModelError, match=mentioning("eos_token_id token")):
        load_model(str(folder))


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
    return (
        b"GGUF" + head + b"".join(struct.pack("<IQ", *one) for one in kinds_and_counts) + bytes(64)
    )


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
    gguf: bytes,
    damage: Callable[[bytes], bytes],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf)
    check_gguf(path)
    path.write_bytes(damage(gguf))
    with pytest.raises(ModelError, match=words):
        load_model(str(path))


def test_a_gguf_array_of_millions_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The library makes objects of each item: a file of 50 MB took minutes and gigabytes."""
    path, items = tmp_path / "model.gguf", 2**22 + 1
    key = struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 0, items) + bytes(items)
    )
    with pytest.raises(ModelError, match="damaged"):
        check_gguf(path)
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64}, "lm_head.weight [64, 32] [64, 64] config.json"),
        ({"intermediate_size": 8}, "model.layers.0.mlp.down_proj.weight [32, 32] 8] config.json"),
        ({"num_attention_heads": 0}, "ZeroDivisionError config.json"),
        ({"hidden_act": "swish-glu"}, "KeyError: 'swish-glu' config.json"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_says_where_to_look(
    change: dict[str, object], said: str, copy: Path
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=mentioning(said)):
        load_model(str(copy))
