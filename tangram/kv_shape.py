"""What a model stores per token of context, read from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tangram.errors import ConfigError

# What published config.json files of these families leave to Transformers' defaults.
_FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
# Fields of models whose layers do not all keep keys and values of their own: their size would come out wrong.
_FOREIGN_FIELDS = (
    "num_kv_shared_layers",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_period",
    "full_attention_interval",
)


@dataclass(frozen=True)
class KVShape:
    """What one model stores per token.

    `windows` has one entry a layer: the sliding window in tokens, None = the whole context. `latent` marks multi-head
    latent attention (MLA): one vector of `head_dim` elements is both key and value of all query heads.
    """

    model: str
    kv_heads: int
    head_dim: int
    latent: bool
    windows: tuple[int | None, ...]

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


def presets() -> dict[str, str]:
    """The names of the presets and the model each was read from."""
    return {name: str(entry["source"]) for name, entry in _read_presets().items()}


def read_shape(model: str | Path | Mapping[str, Any]) -> KVShape:
    """What a model stores per token, from a preset's name, a folder, a config.json or its content."""
    name, config = _read_config(model)
    text = config.get("text_config", config)
    text = {**_FAMILY_DEFAULTS.get(text.get("model_type", ""), {}), **text}
    for field in _FOREIGN_FIELDS:
        if text.get(field):
            raise ConfigError(f"{name}: {field} is {text[field]!r}: not every layer has a KV cache of its own")
    latent = _given(text, "kv_lora_rank")
    kv_heads, head_dim = _latent_heads(name, text) if latent else _heads(name, text)
    windows = tuple(_window(name, text, layer) for layer in range(_field(name, text, "num_hidden_layers")))
    return KVShape(name, kv_heads, head_dim, latent, windows)


def _heads(name: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads and head dim, with the defaults that all Transformers models share."""
    query_heads = _field(name, config, "num_attention_heads")
    kv_heads = _field(name, config, "num_key_value_heads") if _given(config, "num_key_value_heads") else query_heads
    if _given(config, "head_dim"):
        return kv_heads, _field(name, config, "head_dim")
    return kv_heads, _field(name, config, "hidden_size") // query_heads


def _latent_heads(name: str, config: Mapping[str, Any]) -> tuple[int, int]:
    return 1, _field(name, config, "kv_lora_rank") + _field(name, config, "qk_rope_head_dim")


def _read_presets() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(files("tangram").joinpath("size_presets.json").read_text("utf-8"))
    return content


def _read_config(model: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The model's name and the content of its config.json."""
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or model.get("model_type") or "model"), model
    known = _read_presets()
    if str(model) in known:
        return str(model), known[str(model)]["config"]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"model {str(model)!r} is neither a preset nor a folder with a config.json; presets: {', '.join(known)}"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, it must hold a JSON object")
    return path.resolve().parent.name, content


def _given(config: Mapping[str, Any], field: str) -> bool:
    return config.get(field) is not None


def _field(model: str, config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if value is None:
        raise ConfigError(f"{model}: config.json has no {field}, the size of the KV cache depends on it")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{model}: {field} is {value!r}, it must be a whole number of at least 1")
    return value


def _window(model: str, config: Mapping[str, Any], layer: int) -> int | None:
    """The sliding window of one layer, by the several ways in which configs say it; None = full attention."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if layer >= len(kinds) or kinds[layer] not in ("full_attention", "sliding_attention"):
            kind = kinds[layer] if layer < len(kinds) else "missing"
            raise ConfigError(f"{model}: layer_types[{layer}] is {kind}, only full and sliding attention are known")
        return None if kinds[layer] == "full_attention" else _field(model, config, "sliding_window")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    if _given(config, "sliding_window_pattern") and (layer + 1) % _field(model, config, "sliding_window_pattern") == 0:
        return None
    if config.get("use_sliding_window") and layer < config.get("max_window_layers", 0):
        return None  # Qwen: the first layers keep full attention
    return _field(model, config, "sliding_window")
