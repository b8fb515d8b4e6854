"""Rotary frequencies that depend on the longest sequence: chosen once for an engine.

Transformers chooses them in every pass, where one request would change another's keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tangram.errors import ModelError

_log = logging.getLogger("tangram")

# Under our names Transformers computes the same, but chooses nothing in a pass.
_FIXED = {"longrope": "tangram-longrope", "dynamic": "tangram-ntk"}
ROPE_INIT_FUNCTIONS.update({ours: ROPE_INIT_FUNCTIONS[theirs] for theirs, ours in _FIXED.items()})


def fix_frequencies(config: PretrainedConfig, max_tokens: int | None) -> None:
    """Write into `config` the frequencies for sequences of up to `max_tokens`, and log the choice.

    Without a limit, they have up to `max_position_embeddings`. `longrope` gets its short factors up
    to `original_max_position_embeddings` tokens and its long ones beyond (Ding et al., arXiv
    2402.13753). `dynamic` keeps its base up to `max_position_embeddings` tokens. Beyond, the base
    grows, and `max_tokens` replaces that field. Raises `ModelError` if a number that decides is
    none.
    """
    text = config.get_text_config()
    tokens = min(max_tokens or int(text.max_position_embeddings), longest_positions(text))
    for parameters in _rope_parameters(text):
        kind = _kind(parameters)
        if kind == "longrope":
            chosen = _choose_factors(text, parameters, tokens)
        elif kind == "dynamic":
            chosen = _choose_base(text, parameters, tokens)
        else:
            continue
        parameters["rope_type"] = _FIXED[kind]
        _log.info("rope_type %s, sequences of up to %d tokens: %s", kind, tokens, chosen)


def longest_positions(config: PretrainedConfig) -> int:
    """The most tokens that a sequence may have: a `dynamic` rotation stretches by its factor."""
    parameters = getattr(config, "rope_parameters", None) or {}
    stretch = _number(config, parameters, "factor") if _kind(parameters) == "dynamic" else 1
    return int(config.max_position_embeddings * stretch)


def _rope_parameters(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Those of all layers, or of each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from [each for each in parameters.values() if isinstance(each, dict)] or [parameters]


def _kind(parameters: dict[str, Any]) -> str | None:
    # HunYuan's `dynamic` with an alpha is fixed already.
    return None if parameters.get("alpha") else parameters.get("rope_type")


def _choose_factors(config: PretrainedConfig, parameters: dict[str, Any], tokens: int) -> str:
    original = _number(config, parameters, "original_max_position_embeddings")
    side, other = ("long", "short") if tokens > original else ("short", "long")
    for name in ("factor", "mscale"):  # PhiMoE has mscales
        if f"{side}_{name}" in parameters:
            parameters[f"{other}_{name}"] = parameters[f"{side}_{name}"]
    return f"{side} factors (long ones beyond {original})"


def _choose_base(config: PretrainedConfig, parameters: dict[str, Any], tokens: int) -> str:
    positions = int(config.max_position_embeddings)
    if tokens > positions:
        dims = 2 * len(ROPE_INIT_FUNCTIONS["dynamic"](config)[0])
        factor = _number(config, parameters, "factor")
        stretch = factor * tokens / positions - (factor - 1)
        parameters["rope_theta"] *= stretch ** (dims / (dims - 2))
        config.max_position_embeddings = tokens
    return f"base {parameters['rope_theta']:.6g} (growing beyond {positions})"


def _number(config: PretrainedConfig, parameters: dict[str, Any], name: str) -> float:
    value = parameters.get(name)
    if isinstance(value, int | float) and 1 <= value < math.inf:
        return value
    raise ModelError(
        f"{config.model_type}: rope_parameters.{name} is {value!r}, it must be a number of at "
        "least 1: fetch config.json again"
    )
