"""A tokenizer without its model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from tangram.model.auto_classes import read_tokenizer
from tangram.model.load import resolve_source


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name` alone."""
    return read_tokenizer(resolve_source(name))
