"""The ranges of request fields, in one place: Python API and server refuse the same values in the same words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tangram.errors import RequestError

if TYPE_CHECKING:
    from tangram.types import SamplingParams

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # each new token is compared with every beginning of every stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024


def _between(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not (math.isfinite(value) and inside):
        bracket = "(" if open_low else "["
        raise RequestError(f"{field} is {value}, it must lie in {bracket}{low}, {high}]", field)


def check_sampling(params: SamplingParams) -> None:
    """Raise `RequestError` naming the first field that is out of range."""
    _between("n", params.n, 1, MAX_SAMPLES)
    _between("temperature", params.temperature, 0.0, 100.0)
    _between("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _between("min_p", params.min_p, 0.0, 1.0)
    _between("repetition_penalty", params.repetition_penalty, 0.0, 10.0, open_low=True)
    _between("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _between("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.top_k is not None:
        _between("top_k", params.top_k, 1, 2**31 - 1)
    if params.logprobs is not None:
        _between("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.max_tokens is not None:
        _between("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _between("min_tokens", params.min_tokens, 0, 2**31 - 1 if params.max_tokens is None else params.max_tokens)
    if params.min_tokens and params.stop:
        message = f"min_tokens is {params.min_tokens} and stop has texts, which could end an answer before: send one"
        raise RequestError(message, "min_tokens")
    if params.seed is not None:
        _between("seed", params.seed, -(2**63), 2**63 - 1)
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(params.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    if any(not text for text in params.stop):
        raise RequestError("stop holds an empty string, it would end every answer at once: remove it", "stop")
    longest = max(map(len, params.stop), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop has a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", "stop"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids has {len(params.stop_token_ids)} tokens, at most {MAX_STOP_TOKEN_IDS} are allowed"
        raise RequestError(message, "stop_token_ids")
    if len(params.logit_bias) > MAX_BIASES:
        message = f"logit_bias names {len(params.logit_bias)} tokens, at most {MAX_BIASES} are allowed"
        raise RequestError(message, "logit_bias")
    for token, bias in params.logit_bias.items():
        _between(f"logit_bias[{token}]", bias, -100.0, 100.0)
