"""How an engine speculates: the method and its numbers, as `--speculative-config` gives them.

Names and form are vLLM's where vLLM has the method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from tangram.errors import ConfigError
from tangram.limits import Bounds

NAME = "speculative_config"
MOST_DRAFTED = 64
_SHARE = Bounds(0.0, 1.0)
_MOST_GIB = 2.0**20


def _number(default: float | None, bounds: Bounds) -> Any:
    return field(default=default, metadata={"bounds": bounds})


@dataclass(frozen=True)
class SpeculativeConfig:
    """What all methods have: at most `num_speculative_tokens` are drafted at a time.

    Raises `ConfigError` naming the field that is out of range.
    """

    num_speculative_tokens: int = _number(8, Bounds(1, MOST_DRAFTED))

    @property
    def method(self) -> str:
        """Its name."""
        return next(name for name, kind in METHODS.items() if isinstance(self, kind))

    def __post_init__(self) -> None:
        for entry in fields(self):
            bounds, value = entry.metadata.get("bounds"), getattr(self, entry.name)
            if bounds is not None and value is not None:
                bounds.check_option(f"{NAME}.{entry.name}", value)


@dataclass(frozen=True)
class CompressedKv(SpeculativeConfig):
    """The model drafts for itself from the `kv_retention` of its KV entries that score best."""

    kv_retention: float = _number(0.25, Bounds(0.01, 0.99))


@dataclass(frozen=True)
class Ngram(SpeculativeConfig):
    """What followed when the last `prompt_lookup_min` to `prompt_lookup_max` tokens came before."""

    prompt_lookup_min: int = _number(2, Bounds(2, MOST_DRAFTED))
    prompt_lookup_max: int = _number(5, Bounds(2, MOST_DRAFTED))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{NAME}.prompt_lookup_min is {self.prompt_lookup_min}, it must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )


@dataclass(frozen=True)
class Suffix(SpeculativeConfig):
    """What most continuations of the same tokens have in common, in the sequence and in recent
    answers.

    The `suffix_decoding_` fields are those of vLLM. They are the most tokens of a pattern, and how
    many tokens to draft for each token of it. Then come the least share of continuations that
    agree, and how many answers are remembered.
    """

    num_speculative_tokens: int = _number(16, Bounds(1, MOST_DRAFTED))
    suffix_decoding_max_tree_depth: int = _number(24, Bounds(2, 256))
    suffix_decoding_max_spec_factor: float = _number(1.0, Bounds(0.1, 16.0))
    suffix_decoding_min_token_prob: float = _number(0.1, _SHARE)
    suffix_decoding_max_cached_requests: int = _number(1000, Bounds(0, 100_000))


@dataclass(frozen=True)
class DraftModel(SpeculativeConfig):
    """A smaller `model` with the same tokenizer drafts.

    `kv_cache_gib` of the engine's memory for KV pages are its own. Without it, both models have
    pages for as many sequences of max_model_len.
    """

    model: str = ""
    kv_cache_gib: float | None = _number(None, Bounds(0.0, _MOST_GIB, open_low=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError(f"{NAME}.model is missing: name the model that drafts")


METHODS: Mapping[str, type[SpeculativeConfig]] = MappingProxyType(
    {"compressed_kv": CompressedKv, "ngram": Ngram, "suffix": Suffix, "draft_model": DraftModel}
)
_KINDS = {int: "an integer", float: "a number", str: "a text"}


def read_speculative_config(
    given: str | Mapping[str, Any] | SpeculativeConfig,
) -> SpeculativeConfig:
    """The configuration of a JSON object, or of the same as a mapping.

    Raises `ConfigError` naming what is not known, missing, of another type or out of range.
    """
    if isinstance(given, SpeculativeConfig):
        return given
    values = dict(_parse(given) if isinstance(given, str) else given)
    method = values.pop("method", None)
    if method not in METHODS:
        known = ", ".join(METHODS)
        found = "missing" if method is None else f"{method!r}"
        raise ConfigError(f"{NAME}.method is {found}, it must be one of {known}")
    kind = METHODS[method]
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in types:
            listed = ", ".join(types)
            raise ConfigError(f"{NAME}.{name} is no field of {method}: it has {listed}")
        _check_type(f"{NAME}.{name}", value, types[name])
    return kind(**values)


def _parse(text: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{NAME} is no JSON ({error}): {_example()}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{NAME} is no JSON object: {_example()}")
    return values


def _example() -> str:
    return """write it like '{"method": "ngram", "num_speculative_tokens": 4}'"""


def _check_type(name: str, value: Any, kind: Any) -> None:
    kind = next((part for part in get_args(kind) if part is not NoneType), kind)  # float | None
    fits = isinstance(value, int if kind is int else (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}, it must be {_KINDS[kind]}")
