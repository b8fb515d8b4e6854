"""The size of a model's weights, from its safetensors files or estimated from its config.json.

A layer has the projections of attention (of latent attention as in DeepSeek-V2, section 2.1) and
those of a feed-forward network. The network is gated in nearly all families, or consists of several
experts and a router.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tangram.errors import ConfigError
from tangram.model.config_json import ModelConfig
from tangram.model.folder import INDEX, read_shards

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a rounded weight; those of 4 bits have a scale and an offset of 2 bytes for each 32. The head
# is rounded to 8 bits.
_MAP_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}
# Families whose feed-forward networks have two matrices, not three, of four times the hidden size
# by default.
_PLAIN = frozenset(
    {
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "codegen",
        "gpt_bigcode",
        "opt",
        "bloom",
        "falcon",
        "phi",
        "mpt",
    }
    | {"starcoder2", "persimmon", "nemotron"}
)
# Families that learn a vector for each position.
_POSITIONS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt"})
_MOST_HEADER_BYTES = 100_000_000  # that safetensors itself reads
_WHAT = "the size of the weights"


@dataclass(frozen=True)
class Weights:
    """Parameters, and the bytes they take in `dtype`; `source` says where the count comes from.

    With a `quantization` the linear maps take fewer; `embedding` are the parameters of the token
    embedding, which stays as it is, and `tied` says that it is the head, too.
    """

    parameters: int
    dtype: str
    source: Literal["config.json", "safetensors"]
    quantization: str | None = None
    embedding: int = 0
    tied: bool = False

    @property
    def bytes(self) -> int:
        """In memory. Norms and biases count as parts of linear maps; they are less than 1 %."""
        if self.quantization is None:
            return self.parameters * _BYTES[self.dtype]
        head = self.embedding
        maps = self.parameters - self.embedding - (0 if self.tied else head)
        rounded = math.ceil(maps * _MAP_BYTES[self.quantization])
        return self.embedding * _BYTES[self.dtype] + head + rounded


def weights_dtype(config: ModelConfig, dtype: str = "auto") -> str:
    """`dtype`; for auto the model's own, or bfloat16 if that is no dtype to compute in.

    Raises `ConfigError` for an unknown one.
    """
    if dtype == "auto":
        stated = str(config.content.get("dtype") or config.content.get("torch_dtype"))
        return stated if stated in _BYTES else "bfloat16"
    if dtype not in _BYTES:
        raise ConfigError(f"dtype is {dtype!r}, it must be auto or one of {', '.join(_BYTES)}")
    return dtype


def read_weights(
    config: ModelConfig, dtype: str = "auto", quantization: str | None = None
) -> Weights:
    """The weights of a model in its `weights_dtype`, its linear maps rounded to `quantization`.

    Raises `ConfigError` naming a missing field, or if experts cannot be rounded.
    """
    chosen = weights_dtype(config, dtype)
    if quantization is not None:
        return _count_rounded(config, read_weights(config, chosen), quantization)
    # Quantised tensors hold several parameters an element.
    stored = (
        None
        if config.folder is None or config.is_given("quantization_config")
        else _count_stored(config.folder)
    )
    if stored is not None:
        return Weights(stored, chosen, "safetensors")
    return Weights(_estimate(config), chosen, "config.json")


def _count_rounded(config: ModelConfig, plain: Weights, quantization: str) -> Weights:
    if experts := next((name for name in _EXPERTS if config.content.get(name)), None):
        raise ConfigError(
            f"quantization is {quantization!r}, but {config.name} has {experts} "
            f"{config.content[experts]}: weights of experts are not quantised: leave it out"
        )
    vocabulary, hidden = (config.count(name, _WHAT) for name in ("vocab_size", "hidden_size"))
    return replace(
        plain,
        quantization=quantization,
        embedding=vocabulary * hidden,
        tied=bool(config.content.get("tie_word_embeddings", True)),
    )


def _count_stored(folder: Path) -> int | None:
    """The parameters in the headers of its safetensors files; None if a file is missing."""
    index = folder / INDEX
    try:
        if index.is_file():
            paths = [folder / name for name in read_shards(index)]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        return (
            sum(_elements(path) for path in paths)
            if paths and all(path.is_file() for path in paths)
            else None
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: the headers of its safetensors files cannot be read ({error})"
        ) from error


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} says that its header has {length:,} bytes")
        header = json.loads(file.read(length))
    return sum(
        math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    )


def _estimate(config: ModelConfig) -> int:
    hidden, layers = config.count("hidden_size", _WHAT), config.count("num_hidden_layers", _WHAT)
    vocabulary, tied = (
        config.count("vocab_size", _WHAT),
        config.content.get("tie_word_embeddings", True),
    )
    rows = vocabulary * (1 if tied else 2)
    if config.content.get("model_type") in _POSITIONS:
        rows += config.count("max_position_embeddings", _WHAT)
    attention = (
        _latent(config, hidden) if config.is_given("kv_lora_rank") else _attention(config, hidden)
    )
    networks = sum(_network(config, hidden, layer) for layer in range(layers))
    return rows * hidden + layers * (attention + 2 * hidden) + networks + hidden


def _attention(config: ModelConfig, hidden: int) -> int:
    heads = config.count("num_attention_heads", _WHAT)
    kv_heads = (
        config.count("num_key_value_heads", _WHAT)
        if config.is_given("num_key_value_heads")
        else heads
    )
    size = config.count("head_dim", _WHAT) if config.is_given("head_dim") else hidden // heads
    return 2 * hidden * (heads + kv_heads) * size


def _latent(config: ModelConfig, hidden: int) -> int:
    names = (
        "num_attention_heads",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    )
    heads, latent, turned, plain, value = (config.count(name, _WHAT) for name in names)
    query = heads * (turned + plain)
    asked = hidden * query
    if config.is_given("q_lora_rank"):
        asked = config.count("q_lora_rank", _WHAT) * (hidden + query)
    return (
        asked
        + hidden * (latent + turned)
        + latent * heads * (plain + value)
        + heads * value * hidden
    )


def _network(config: ModelConfig, hidden: int, layer: int) -> int:
    """The feed-forward network of a layer."""
    content = config.content
    plain = content.get("model_type") in _PLAIN
    if plain and not config.is_given("intermediate_size"):
        return 8 * hidden * hidden
    experts = next((content[name] for name in _EXPERTS if config.is_given(name)), 0)
    if not experts or _is_dense(content, layer):
        return (2 if plain else 3) * hidden * config.count("intermediate_size", _WHAT)
    field = (
        "moe_intermediate_size" if config.is_given("moe_intermediate_size") else "intermediate_size"
    )
    width = config.count(field, _WHAT)
    shared = (
        content.get("shared_expert_intermediate_size")
        or (content.get("n_shared_experts") or 0) * width
    )
    return int(3 * hidden * (experts * width + shared) + hidden * experts)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _is_dense(content: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a model with experts has none, in the several forms of configs."""
    step = content.get("decoder_sparse_step") or 1
    first = content.get("first_k_dense_replace") or 0
    return (
        layer < first or layer in (content.get("mlp_only_layers") or ()) or bool((layer + 1) % step)
    )
