"""How a model's makers advise to sample: generation_config.json, or keys of a GGUF file.

Needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from tangram.errors import ConfigError, ModelError, RequestError
from tangram.foreign_files import expand_home, parse_json, read_text
from tangram.limits import MAX_STOP_TOKEN_IDS, TOKEN_COUNT
from tangram.model import embedded
from tangram.model.source import EMBEDDED, gguf_file, is_gguf
from tangram.types import OPENAI_SAMPLING, SAMPLING_LIMITS, SamplingValues

FILE = "generation_config.json"
_MOST_BYTES = 2**20
_MOST_SHOWN = 64  # fields of a file, and characters of a name
# Names of values in the file, and here.
_NAMES = {name: name for name in asdict(OPENAI_SAMPLING) if name != "max_tokens"}
_NAMES["max_new_tokens"] = "max_tokens"
_WHOLE = {name for name, value in asdict(OPENAI_SAMPLING).items() if not isinstance(value, float)}
_LIMITS = {**SAMPLING_LIMITS, "max_tokens": TOKEN_COUNT}  # 0 is for requests alone
_GGUF_PREFIX = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Fields that change no answer here. vLLM reads `do_sample` and `max_length` as little.
_WITHOUT_EFFECT = frozenset(
    {
        *("transformers_version", "_from_model_config", "do_sample", "max_length", "use_cache"),
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation"),
        *("chat_format", "max_window_size", "user_token_id", "assistant_token_id"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
    }
)
_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class ModelDefaults:
    """What holds where a request states nothing, more `eos_token_ids`, and `origin`, in words."""

    sampling: SamplingValues = OPENAI_SAMPLING
    eos_token_ids: tuple[int, ...] = ()
    origin: str = "OpenAI's defaults"

    def describe(self) -> str:
        """The values that differ from OpenAI's, and where they are from."""
        neutral = asdict(OPENAI_SAMPLING)
        shown = [
            f"{name} {value:g}"
            for name, value in asdict(self.sampling).items()
            if value != neutral[name]
        ]
        return f"{', '.join(shown) or 'temperature 1, no filters'} ({self.origin})"


NO_ADVICE = ModelDefaults()


def check_option(option: str) -> None:
    """Raise `ConfigError` unless it is auto, none, or a folder that has the file."""
    if option not in ("auto", "none") and not (expand_home(option) / FILE).is_file():
        raise ConfigError(
            f"generation_config is {option!r}, there is no {FILE} in a folder of this name: give "
            "auto, none (vLLM's vllm) or a folder that has one"
        )


def read_defaults(name: str, folder: Path, option: str) -> ModelDefaults:
    """The defaults of model `name`, whose files lie in `folder`.

    `option` is auto for the model's own, none for OpenAI's, or a folder whose file replaces the
    model's. Raises `ModelError` naming file, field, value and limit, `ConfigError` for a folder
    without the file.
    """
    check_option(option)
    if option == "none":
        return NO_ADVICE
    if option != "auto":
        return _read_file(expand_home(option) / FILE)
    if name == EMBEDDED:
        return ModelDefaults(embedded.SAMPLING, origin="Tangram's choice for this model")
    if is_gguf(name):
        return _read_gguf(gguf_file(name))
    path = folder / FILE
    return _read_file(path) if path.exists() else NO_ADVICE


def _read_file(path: Path) -> ModelDefaults:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, at most {_MOST_BYTES} are read")
        content = parse_json(read_text(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, it must hold a JSON object")
    except (OSError, ValueError) as error:
        raise _refusal(path, str(error)) from error
    stated = {name: value for name, value in content.items() if value is not None}
    ends = stated.pop("eos_token_id", [])
    _tell_unread(path, stated.keys() - _NAMES.keys() - _WITHOUT_EFFECT)
    known = {_NAMES[name]: (name, stated[name]) for name in stated.keys() & _NAMES.keys()}
    return ModelDefaults(
        _check(path, known), _check_ends(path, ends), f"{FILE} of {path.parent.name}"
    )


def _read_gguf(path: Path) -> ModelDefaults:
    from tangram.model.weight_files import gguf_numbers

    found = gguf_numbers(path, _GGUF_PREFIX)
    stated = {key.removeprefix(_GGUF_PREFIX): value for key, value in found.items()}
    _tell_unread(path, {_GGUF_PREFIX + name for name in stated.keys() - _GGUF_NAMES.keys()})
    known = {
        _GGUF_NAMES[name]: (_GGUF_PREFIX + name, stated[name])
        for name in stated.keys() & _GGUF_NAMES.keys()
    }
    return ModelDefaults(_check(path, known), origin=f"keys of {path.name}") if known else NO_ADVICE


def _check(path: Path, stated: Mapping[str, tuple[str, Any]]) -> SamplingValues:
    """The values by our names, each with its name in the file."""
    values = dict[str, Any]()
    for name, (spelled, value) in sorted(stated.items()):
        kind, spoken = (int, "a whole number") if name in _WHOLE else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise _refusal(path, f"{spelled} is {shortened(value)}, it must be {spoken}")
        try:
            _LIMITS[name].check(spelled, stated[name][1])
        except RequestError as error:
            raise _refusal(path, str(error)) from error
        values[name] = value if name in _WHOLE else float(value)
    return SamplingValues(**values)


def _check_ends(path: Path, given: Any) -> tuple[int, ...]:
    ends = given if isinstance(given, list) else [given]
    if len(ends) > MAX_STOP_TOKEN_IDS:
        raise _refusal(
            path, f"eos_token_id has {len(ends)} tokens, at most {MAX_STOP_TOKEN_IDS} are read"
        )
    for token in ends:
        if type(token) is not int or not 0 <= token < 2**31:
            message = (
                f"eos_token_id has {shortened(token)}, it must be a token id or a list of them"
            )
            raise _refusal(path, message)
    return tuple(ends)


def _refusal(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path}: {reason}: mend the file, or serve without it (--generation-config none)"
    )


def _tell_unread(path: Path, names: Set[str]) -> None:
    if names:
        first = ", ".join(repr(name[:_MOST_SHOWN]) for name in sorted(names)[:_MOST_SHOWN])
        _log.warning("%s: %d fields are without effect here: %s", path.name, len(names), first)
