"""A model's config.json, from a preset, a folder, a file or the Hugging Face Hub.

Fields have the names that most models use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from tangram.errors import ConfigError, ModelError
from tangram.foreign_files import expand_home, parse_json, read_text
from tangram.model.hub import fetch_files, is_hub_id

# The names that most families use, and other names of the same fields.
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_inner"),
    "max_position_embeddings": ("n_positions",),
}
# Fields that published config.json files of these families leave to Transformers' defaults.
_FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {"global_head_dim": 512},
}
# What a field of these families has to be multiplied by: a number, or the value of another field.
_FACTORS: dict[str, dict[str, int | str]] = {
    "jetmoe": {"num_key_value_heads": "num_experts_per_tok"},  # keys are repeated for each expert
    "longcat_flash": {"num_hidden_layers": 2},  # a layer has attention twice
}
# Where models for images or audio keep the config of their language part.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
_FILE = "config.json"
_MOST_BYTES = 64 * 2**20  # of a config.json; those of real models have some kilobytes
# Counts of parts, also of vision towers and in GGUF files. Transformers makes an object of each
# before it looks at a weight. Published models have at most some hundreds.
_PARTS = re.compile(
    r"(\w+_)?(num|n|encoder|decoder)_(\w+_)?(layers?|blocks?|experts?)|depth|"
    r".+\.(block|expert)_count"
)
_MOST_PARTS = 2048


@dataclass(frozen=True)
class ModelConfig:
    """The language part of a config.json, and its folder (None for presets and content)."""

    name: str
    content: Mapping[str, Any]
    folder: Path | None = None

    def is_given(self, field: str) -> bool:
        """Whether the field has a value."""
        return self.content.get(field) is not None

    def count(self, field: str, what: str) -> int:
        """A number of at least 1.

        Raises `ConfigError` for another or none; `what` depends on it.
        """
        value = self.content.get(field)
        if value is None:
            raise ConfigError(f"{self.name}: config.json has no {field}, {what} depends on it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.name}: {field} is {value!r}, it must be a whole number of at least 1"
            )
        return value


def presets() -> dict[str, str]:
    """The names of the presets and the model each was read from."""
    return {name: str(entry["source"]) for name, entry in _read_presets().items()}


def read_config(model: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The config of a preset, a folder, a config.json, its content, or a Hugging Face id.

    Of a Hugging Face model only config.json is fetched. Raises `ConfigError` if nothing is found,
    or if it is no config, and `ModelError` if the Hub has none, or as `refuse_parts`.
    """
    if isinstance(model, Mapping):
        return _of(
            str(model.get("_name_or_path") or model.get("model_type") or "model"), model, None
        )
    known = _read_presets()
    if str(model) in known:
        return _of(str(model), known[str(model)]["config"], None)
    path, name = _place(model, known)
    if path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"{path} is a GGUF file, of which sizes are not read: give the config.json, or the id, "
            "of the model that it was made of"
        )
    return _of(name, read_content(path), path.parent)


def read_content(path: Path) -> dict[str, Any]:
    """All of a config.json.

    Raises `ConfigError` if it is too large or no JSON object.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes: give a {_FILE}")
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, it must hold a JSON object")
    return content


def refuse_parts(name: str, content: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a config, or a part of it, has more layers or experts than any model.

    Building as many would take hours, and all memory.
    """
    waiting: list[Mapping[str, Any]] = [content]
    while waiting:
        for field, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            elif isinstance(value, int) and value > _MOST_PARTS and _PARTS.fullmatch(field):
                raise ModelError(
                    f"{name}: {field} is {shortened(value)}, it must be at most {_MOST_PARTS}: "
                    "fetch the model again"
                )


def _place(model: str | Path, known: Mapping[str, object]) -> tuple[Path, str]:
    """Where the file lies, and the model's name."""
    path = expand_home(model)
    path = path / _FILE if path.is_dir() else path
    if path.is_file():
        return path, path.resolve().parent.name
    if is_hub_id(str(model)) and not path.exists():
        return fetch_files(str(model), [_FILE]) / _FILE, str(model)
    near = get_close_matches(str(model).lower(), known)
    raise ConfigError(
        f"model {str(model)!r} is neither a preset nor a folder with a {_FILE} nor OWNER/NAME on "
        f"the Hugging Face Hub; presets: {', '.join(known)}"
        + (f"; did you mean {' or '.join(near)}?" if near else "")
    )


def _of(name: str, content: Mapping[str, Any], folder: Path | None) -> ModelConfig:
    """The language part, whose tied embeddings and dtype may be given outside it."""
    refuse_parts(name, content)
    part = next(
        (content[part] for part in _TEXT_PARTS if isinstance(content.get(part), Mapping)), None
    )
    outer = (
        {} if part is None else {field: content[field] for field in _OUTSIDE if field in content}
    )
    stated = content if part is None else part
    text = {**_FAMILY_DEFAULTS.get(stated.get("model_type", ""), {}), **outer, **stated}
    for field, aliases in _ALIASES.items():
        if text.get(field) is None:
            found = next((text[alias] for alias in aliases if text.get(alias) is not None), None)
            text |= {} if found is None else {field: found}
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        text["num_key_value_heads"] = 1  # Falcon 7B and GPT-BigCode, whatever their other fields
    factors = _FACTORS.get(stated.get("model_type", ""), {})
    for field, factor in factors.items():
        count, times = text.get(field), text.get(factor, factor)
        if isinstance(count, int) and isinstance(times, int):
            text[field] = count * times
    return ModelConfig(name, text, folder)


def _read_presets() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(
        files("tangram.model").joinpath("size_presets.json").read_text("utf-8")
    )
    return content
