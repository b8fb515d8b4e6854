"""What the cpu tests share: the embedded model and tiny random ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from tangram.model.load import LoadedModel, adopt, load_model, load_tokenizer


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

    def make(config: PretrainedConfig) -> LoadedModel:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, attn_implementation="tangram", dtype=torch.float32)
        for parameter in model.parameters():
            # The default initialisation makes attention all but uniform, which would hide a wrong mask.
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        return adopt(config.model_type, model, tokenizer)

    return make
