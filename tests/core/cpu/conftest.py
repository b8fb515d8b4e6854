"""What the cpu tests share: the embedded model and tiny random ones."""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.llm import LLM
from tangram.model.load import LoadedModel, load_model
from tests.small_engines import tiny_model


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The embedded model in float32, whatever this CPU serves best."""
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer; tiny models use the first tokens of its vocabulary."""
    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def adopt_tiny(tokenizer: PreTrainedTokenizerBase) -> Callable[[PretrainedConfig], LoadedModel]:
    """A random model of a config, small enough to run in milliseconds, in float32."""

    return partial(tiny_model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which there is nothing but its config."""
    path = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def small_llm(folder: Path) -> LLM:
    """The engine of that config, with random weights, that nothing is dropped in."""
    return LLM(
        str(folder),
        load_format="dummy",
        kv_retention=1.0,
        chunk_tokens=32,
        page_tokens=8,
        kv_cache_gib=0.01,
        max_num_seqs=4,
        max_num_batched_tokens=128,
    )
