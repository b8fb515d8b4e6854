"""What a model stores per token of context, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.model.config_json import ModelConfig, presets, read_config

__all__ = ["KVShape", "presets", "read_shape"]
_WHAT = "the size of the KV cache"

# Fields of models whose layers differ in what they store: their size would be wrong.
_FOREIGN_FIELDS = (
    "global_head_dim",
    "per_layer_config",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "full_attention_interval",
)


@dataclass(frozen=True)
class KVShape:
    """What one model stores per token.

    `windows` has one entry for each layer that stores something, which those that read another
    layer's keys and values do not: the sliding window in tokens, None = the whole context.
    `value_dim` marks multi-head latent attention (MLA): one vector of `head_dim` elements is the
    key of all query heads, and its first `value_dim` elements are the value.
    """

    model: str
    kv_heads: int
    head_dim: int
    value_dim: int | None
    windows: tuple[int | None, ...]

    @property
    def latent(self) -> bool:
        """Whether attention is latent."""
        return self.value_dim is not None

    @property
    def layer_elements(self) -> int:
        """Elements one layer stores for one token."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim

    @property
    def full_layers(self) -> int:
        """The number of layers that keep the whole context."""
        return sum(window is None for window in self.windows)

    def window_tokens(self, context_tokens: int) -> int:
        """Tokens held by all sliding-window layers together."""
        return sum(min(context_tokens, window) for window in self.windows if window is not None)


def read_shape(model: str | Path | Mapping[str, Any] | ModelConfig) -> KVShape:
    """What a model stores per token, from a `ModelConfig` or any argument of `read_config`.

    Raises `ConfigError` if a field is missing or wrong, or if layers differ in what they store.
    """
    config = model if isinstance(model, ModelConfig) else read_config(model)
    for field in _FOREIGN_FIELDS:
        if value := config.content.get(field):
            raise ConfigError(
                f"{config.name}: {field} is {value!r}: layers differ in what they store"
            )
    kv_heads, head_dim, value_dim = (
        _latent_heads(config) if config.is_given("kv_lora_rank") else _heads(config)
    )
    windows = tuple(_window(config, layer) for layer in range(_count_layers(config)))
    return KVShape(config.name, kv_heads, head_dim, value_dim, windows)


def _count_layers(config: ModelConfig) -> int:
    """The layers that store something: the last ones may read earlier layers."""
    field, layers = "num_kv_shared_layers", config.count("num_hidden_layers", _WHAT)
    if not config.content.get(field):
        return layers
    shared = config.count(field, _WHAT)
    if shared >= layers:
        raise ConfigError(
            f"{config.name}: {field} is {shared}, it must be less than num_hidden_layers, {layers}"
        )
    return layers - shared


def _heads(config: ModelConfig) -> tuple[int, int, None]:
    """KV heads and head dim, with the defaults that all Transformers models share."""
    query_heads = config.count("num_attention_heads", _WHAT)
    kv_heads = (
        config.count("num_key_value_heads", _WHAT)
        if config.is_given("num_key_value_heads")
        else query_heads
    )
    if config.is_given("head_dim"):
        return kv_heads, config.count("head_dim", _WHAT), None
    return kv_heads, config.count("hidden_size", _WHAT) // query_heads, None


def _latent_heads(config: ModelConfig) -> tuple[int, int, int]:
    rank = config.count("kv_lora_rank", _WHAT)
    return 1, rank + config.count("qk_rope_head_dim", _WHAT), rank


def _window(config: ModelConfig, layer: int) -> int | None:
    """The sliding window of one layer; None = it sees the whole context."""
    window, longest = _stated_window(config, layer), config.content.get("max_position_embeddings")
    return None if window is None or (isinstance(longest, int) and window >= longest) else window


def _stated_window(config: ModelConfig, layer: int) -> int | None:
    """The sliding window of one layer, in the several forms of configs."""
    content = config.content
    kinds = content.get("layer_types")
    if kinds is not None:
        if layer >= len(kinds) or kinds[layer] not in ("full_attention", "sliding_attention"):
            kind = kinds[layer] if layer < len(kinds) else "missing"
            raise ConfigError(
                f"{config.name}: layer_types[{layer}] is {kind}, only full and sliding attention "
                "are known"
            )
        return None if kinds[layer] == "full_attention" else config.count("sliding_window", _WHAT)
    if content.get("sliding_window") is None or content.get("use_sliding_window") is False:
        return None
    if (
        config.is_given("sliding_window_pattern")
        and (layer + 1) % config.count("sliding_window_pattern", _WHAT) == 0
    ):
        return None
    if content.get("use_sliding_window") and layer < content.get("max_window_layers", 0):
        return None  # Qwen: the first layers keep full attention
    return config.count("sliding_window", _WHAT)
