"""The only callers of Transformers' auto classes: code that a folder names is never run.

A config.json or tokenizer_config.json with `auto_map` names Python files, beside it or on the Hub.
Without an explicit `trust_remote_code` Transformers asks on standard input whether to run them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from tangram.errors import ModelError
from tangram.model.source import is_on_hub
from tangram.model.text_growth import check_growth

_NO_CODE: dict[str, Any] = {"trust_remote_code": False}
# Types of text parts that Transformers reads alone from the files of a whole model, and what is
# beside them there: pictures of Gemma 3n need another library (timm).
_GEMMA_PARTS = tuple(
    f"model.{part}."
    for part in ("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio")
)
_BESIDE_TEXT = {
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _GEMMA_PARTS),
    "llama4_text": ("vision_model.", "multi_modal_projector."),
}
# What Transformers does not know of the names there: patterns, and what they become.
_RENAMED = {
    kind: {r"^model\.language_model\.": "model."} for kind in ("gemma4_text", "gemma4_unified_text")
}


@contextmanager
def without_advice() -> Iterator[None]:
    """Hold back what Transformers advises to whoever calls a model in code of their own.

    Its progress bars, too, where standard error is a file: each of their states would stay there.
    """
    logger = logging.getLogger("transformers")
    shown = sys.stderr is not None and sys.stderr.isatty()  # it may have been closed
    level, hides_bars = logger.level, is_progress_bar_enabled() and not shown
    logger.setLevel(logging.ERROR)
    if hides_bars:
        disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.setLevel(level)
        if hides_bars:
            enable_progress_bar()  # type: ignore[no-untyped-call]


def read_config(folder: Path, name: str) -> PretrainedConfig:
    """The config of model `name`, of a class of Transformers; of some types that of the text part.

    Raises `ModelError` if only code of the folder could read it, and `UNREADABLE` of `convert.py`
    for other faults.
    """
    with _refuse_code(name):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, **_NO_CODE)
    if is_on_hub(name):
        config.name_or_path = name  # Transformers mends the tokenizers of some ids
    return _choose_part(config)


def _choose_part(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a text part that is read alone, with what holds for all; else `config`."""
    text = getattr(config, "text_config", None)
    if not isinstance(text, PretrainedConfig) or text.model_type not in _BESIDE_TEXT:
        return config
    if text.model_type != f"{config.model_type}_text":  # an assistant's reads another model
        return config
    for field in ("name_or_path", "dtype", "quantization_config"):
        if (value := getattr(config, field, None)) is not None:
            setattr(text, field, value)
    return text


def read_tokenizer(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, with `options` of Transformers.

    Raises `ModelError` if only code of the folder could make it, or if its rules multiply a text
    (`text_growth.py`), and `ValueError` if its files are no valid tokenizer.
    """
    try:
        with _refuse_code(str(folder)):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder,
                model_max_length=VERY_LARGE_INTEGER,  # the model has the limit; a file's may be "x"
                **options,
                **_NO_CODE,
            )
    except Exception as error:  # the Rust library behind it raises bare `Exception`s
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error
    check_growth(tokenizer, str(folder))
    return tokenizer


@without_advice()
def read_model(
    folder: Path, config: PretrainedConfig | None = None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a folder, with `options` of Transformers, and its report on the tensors.

    Raises `ModelError` if only code of the folder could make it, or if a tensor has another shape
    than its config says.
    """
    with _refuse_code(str(folder)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            key_mapping=None if config is None else _RENAMED.get(config.model_type),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report lists them, an error would not
            use_safetensors=True,  # other formats are pickles, which can run code
            **options,
            **_NO_CODE,
        )
    model, report = loaded
    beside = _BESIDE_TEXT.get(model.config.model_type, ())
    surplus = {key for key in report["unexpected_keys"] if not key.startswith(beside)}
    report["unexpected_keys"] = surplus
    if report["mismatched_keys"]:
        key, stored, wanted = min(report["mismatched_keys"])
        raise ModelError(
            f"model {str(folder)!r}: {key} is {list(stored)} in its weights and {list(wanted)} by "
            "its config.json: fetch config and weights again, of one version"
        )
    return model, report


@without_advice()
def make_model(
    config: PretrainedConfig, attention: str, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A model of `config` with the weights that training begins with, on torch's current device.

    Raises `ModelError` if only code of a folder could make it.
    """
    with _refuse_code(str(config.name_or_path)):
        # Without a name of ours the config could name kernels to fetch.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention, **_NO_CODE
        )
    return model


@contextmanager
def _refuse_code(name: str) -> Iterator[None]:
    """Turn Transformers' refusal, which names an option that there is not, into ours."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise foreign_code(name) from error


def foreign_code(name: str) -> ModelError:
    """The error of model `name`, of which only code of its folder knows a part."""
    return ModelError(
        f"model {name!r}: its auto_map names code, of a config, model or tokenizer that "
        "Transformers does not know itself. Code of a model's folder is never run: take a "
        "model of a type that Transformers has"
    )
