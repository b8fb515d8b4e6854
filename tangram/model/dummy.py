"""Models for measuring: a config's shape with random weights, and a vocabulary of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tangram.model.auto_classes import make_model, read_tokenizer
from tangram.model.folder import has_vocabulary

SEED = 0


def random_model(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """Random weights as before training, made on the device.

    Every call there gives the same ones.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        return make_model(config, attention, dtype)


def tokenizer_or_numbers(folder: Path, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the config. Without one, token 17 reads "17"."""
    if has_vocabulary(folder):
        return read_tokenizer(folder, config=config)
    return number_tokens(config.get_text_config().vocab_size)


def number_tokens(vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer of which token 17 reads "17"."""
    numbers = Tokenizer(
        WordLevel({str(token): token for token in range(vocab_size)}, unk_token="0")
    )
    numbers.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=numbers)  # type: ignore[no-untyped-call]
