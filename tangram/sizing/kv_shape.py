"""What a model stores per token of context, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.model.config_json import ModelConfig, presets, read_config
from tangram.types import LayerHeads

__all__ = ["KVShape", "presets", "read_shape"]
_WHAT = "the size of the KV cache"

# Fields of models whose layers differ in what they store: their size would be wrong.
_FOREIGN_FIELDS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "full_attention_interval",
)
# How many times the KV heads of other layers one with a window has.
_WINDOW_HEADS = {"mimo_v2_flash": 2}
# By layer type, the field with its window; None = it sees the whole context.
_WINDOW_FIELDS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


@dataclass(frozen=True)
class KVShape:
    """What one model stores per token.

    `windows` has one entry for each layer that stores something, which those that read another
    layer's keys and values do not: the sliding window in tokens, None = the whole context.
    `value_dim` marks multi-head latent attention (MLA): one vector of `head_dim` elements is the
    key of all query heads, and its first `value_dim` elements are the value. Windows that are
    `chunked` do not slide (Llama 4). `window_heads` are those of layers with a window, if others.
    """

    model: str
    kv_heads: int
    head_dim: int
    value_dim: int | None
    windows: tuple[int | None, ...]
    chunked: bool = False
    window_heads: LayerHeads | None = None

    @property
    def latent(self) -> bool:
        """Whether attention is latent."""
        return self.value_dim is not None

    @property
    def layer_elements(self) -> int:
        """Elements one layer stores for one token, with a window if all have one."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim

    @property
    def window_elements(self) -> int:
        """Elements one layer with a window stores for one token."""
        heads = self.window_heads
        return self.layer_elements if heads is None else 2 * heads.kv_heads * heads.head_dim

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
    found = dict[bool, set[tuple[int, int]]]()
    for layer, window in enumerate(windows):
        heads = _heads_of_layer(config, layer, window, (kv_heads, head_dim))
        found.setdefault(window is None, set()).add(heads)
    if any(len(kinds) > 1 for kinds in found.values()):
        raise ConfigError(f"{config.name}: layers of one kind differ in what they store")
    ((kv_heads, head_dim),) = found.get(True) or found[False]
    others = [LayerHeads(heads, heads, dim) for heads, dim in found.get(False, set())]
    window_heads = next((shape for shape in others if shape[::2] != (kv_heads, head_dim)), None)
    chunked = "chunked_attention" in (_layer_types(config) or ())
    return KVShape(config.name, kv_heads, head_dim, value_dim, windows, chunked, window_heads)


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
        head_dim = config.count("head_dim", _WHAT)
        if config.is_given("v_head_dim") and config.count("v_head_dim", _WHAT) != head_dim:
            raise ConfigError(
                f"{config.name}: v_head_dim is {config.content['v_head_dim']} and head_dim "
                f"{head_dim}: keys and values of two sizes are not served"
            )
        return kv_heads, head_dim, None
    return kv_heads, config.count("hidden_size", _WHAT) // query_heads, None


def _heads_of_layer(
    config: ModelConfig, layer: int, window: int | None, heads: tuple[int, int]
) -> tuple[int, int]:
    """KV heads and head dim of one layer, of which most have `heads`."""
    kv_heads, head_dim = heads
    content = config.content
    listed = content.get("per_layer_config")
    if listed is not None:
        own = listed.get(str(layer), {})
        return own.get("num_key_value_heads", kv_heads), own.get("head_dim", head_dim)
    if window is not None:
        return kv_heads * _WINDOW_HEADS.get(content.get("model_type", ""), 1), head_dim
    if config.is_given("global_head_dim"):
        head_dim = config.count("global_head_dim", _WHAT)
    if content.get("attention_k_eq_v") and config.is_given("num_global_key_value_heads"):
        kv_heads = config.count("num_global_key_value_heads", _WHAT)
    return kv_heads, head_dim


def _latent_heads(config: ModelConfig) -> tuple[int, int, int]:
    rank = config.count("kv_lora_rank", _WHAT)
    return 1, rank + config.count("qk_rope_head_dim", _WHAT), rank


def _layer_types(config: ModelConfig) -> Sequence[str] | None:
    """The kinds of layers, which published configs of Llama 4 do not list."""
    content = config.content
    if content.get("layer_types") is not None or content.get("attention_chunk_size") is None:
        stated: Sequence[str] | None = content.get("layer_types")
        return stated
    every = content.get("no_rope_layer_interval") or 4
    rotates = content.get("no_rope_layers") or [
        (layer + 1) % every for layer in range(config.count("num_hidden_layers", _WHAT))
    ]
    return ["chunked_attention" if turned else "full_attention" for turned in rotates]


def _window(config: ModelConfig, layer: int) -> int | None:
    """The sliding window of one layer; None = it sees the whole context."""
    window, longest = _stated_window(config, layer), config.content.get("max_position_embeddings")
    return None if window is None or (isinstance(longest, int) and window >= longest) else window


def _stated_window(config: ModelConfig, layer: int) -> int | None:
    """The sliding window of one layer, in the several forms of configs."""
    content = config.content
    kinds = _layer_types(config)
    if kinds is not None:
        kind = kinds[layer] if layer < len(kinds) else "missing"
        if kind not in _WINDOW_FIELDS:
            raise ConfigError(
                f"{config.name}: layer_types[{layer}] is {kind}, only {', '.join(_WINDOW_FIELDS)} "
                "are known"
            )
        field = _WINDOW_FIELDS[kind]
        return None if field is None else config.count(field, _WHAT)
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
