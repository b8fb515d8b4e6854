"""What the cpu tests share: the embedded model and tiny random ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tangram.model.load import LoadedModel, load_model, load_tokenizer
from tests.support import tiny_model


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The embedded model."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer; tiny models use the first tokens of its vocabulary."""
    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def adopt_tiny(tokenizer: PreTrainedTokenizerBase) -> Callable[[PretrainedConfig], LoadedModel]:
    """A random model of a config, small enough to run in milliseconds, in float32."""

    return partial(tiny_model, tokenizer=tokenizer)
