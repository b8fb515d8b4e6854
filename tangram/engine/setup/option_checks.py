"""Options that are wrong whatever the weights are: found before these are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from tangram.config import MOST_TOKENS, EngineConfig
from tangram.engine.setup.draft_model import check_vocabulary
from tangram.engine.setup.memory import check_cache_device, check_host_memory
from tangram.engine.setup.profiles import Compression
from tangram.errors import ConfigError
from tangram.model.device import find_device
from tangram.model.frequencies import longest_positions
from tangram.model.load import LoadedModel, load_configured, read_text_config, read_vocabulary
from tangram.model.prepare import check_compile_decode
from tangram.speculative_config import DraftModel


def load_checked(config: EngineConfig) -> LoadedModel:
    """`load_configured`, which may take minutes, after `check_options`."""
    device = check_options(config)
    return load_configured(replace(config, device=device.type))


def check_options(config: EngineConfig) -> torch.device:
    """The device of `config`. Raises what the making of an engine would, as far as it is known."""
    device = find_device(config.device)
    check_cache_device(config, device)
    check_host_memory(config, device)
    if config.compile_decode:
        check_compile_decode(device)
    Compression.of(config, None).check_without_model()
    if isinstance(drafts := config.speculation, DraftModel):
        read_text_config(drafts.model)
        if config.load_format != "dummy":  # such models may have no tokenizer
            names = config.model, drafts.model
            served, drafted = map(read_vocabulary, names)
            check_vocabulary(names[0], served, names[1], drafted)
    if config.max_model_len is not None:
        check_model_len(config, longest_positions(read_text_config(config.model)))
    return device


def longest_sequence(config: EngineConfig) -> int:
    """The most tokens of a sequence, if the KV cache holds as many. Weights are not read."""
    return config.max_model_len or _positions(config)


def _positions(config: EngineConfig) -> int:
    """Those that the model was made for; without a limit the most that an option allows."""
    text = read_text_config(config.model)
    return int(getattr(text, "max_position_embeddings", None) or MOST_TOKENS)


def check_model_len(config: EngineConfig, positions: int) -> None:
    """Raise `ConfigError` if sequences may be longer than the model's `positions`."""
    if config.max_model_len is not None and config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for at most {positions} "
            "positions"
        )
