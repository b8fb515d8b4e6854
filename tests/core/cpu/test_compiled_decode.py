"""Compiled layers compute what eager ones do, and no entry of a sealed chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model import compiled_decode
from tangram.model.cpu_weights import pack_weights
from tangram.model.fused import join_projections
from tangram.model.load import LoadedModel
from tangram.model.quantized import quantize
from tests.mentions import mentioning
from tests.small_engines import LATENT, run, sealed_state, small_engine, tiny_model
from tests.tiny_configs import tiny_config

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
LLAMA = LlamaConfig(**SHAPE)
FORMS: dict[str, tuple[PretrainedConfig, torch.dtype, str | None]] = {
    "bfloat16": (LLAMA, torch.bfloat16, None),
    "int8": (LLAMA, torch.float32, "int8"),
    "windows and norms of heads": (
        Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=WINDOWS),
        torch.float32,
        None,
    ),
    "sinks and experts": (
        GptOssConfig(
            **SHAPE,
            sliding_window=8,
            layer_types=WINDOWS,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        torch.float32,
        None,
    ),
}


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """Compiled graphs of a function are limited in number."""
    torch._dynamo.reset()


class EchoedAttention:
    """Stands for attention: an answer that depends on queries, keys, values and sinks."""

    def __init__(self, decodes_only: bool) -> None:
        self.decodes_only = decodes_only
        self.layers: list[int] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.layers.append(int(module.layer_idx))  # type: ignore[arg-type]
        group = q.shape[1] // k.shape[1]
        out = (q * k.repeat_interleave(group, 1)).tanh() + v.repeat_interleave(group, 1)
        sinks = options.get("s_aux")
        return out if sinks is None else out + sinks[:, None].to(out.dtype)


@torch.inference_mode()
def compute_logits(model: Any, count: int, context: EchoedAttention) -> Tensor:
    tokens = torch.arange(7, 7 + count)[None]
    output = model(input_ids=tokens, position_ids=tokens, use_cache=False, tangram=context)
    logits: Tensor = output.logits[0].float()
    return logits


@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_pass_computes_what_an_eager_one_does(
    form: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    config, dtype, rounded = FORMS[form]
    model = tiny_model(config, tokenizer, dtype=dtype).model
    if rounded is not None:
        quantize(model, rounded)
    join_projections(model)
    pack_weights(model)
    compiled_decode.compile_decode(model)
    expected = {count: compute_logits(model, count, EchoedAttention(False)) for count in (1, 2, 5)}
    graphs = counters["stats"]["unique_graphs"]
    for count, logits in expected.items():
        context = EchoedAttention(True)
        found = compute_logits(model, count, context)
        assert context.layers == [0, 1, 2, 3]
        tolerance = 1e-4 if dtype is torch.float32 else 0.1
        scale = logits.abs().max()
        torch.testing.assert_close(found / scale, logits / scale, rtol=0, atol=tolerance)
    assert counters["stats"]["unique_graphs"] > graphs, "something was compiled"


def test_answers_and_sealed_chunks_are_those_of_an_eager_engine(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    prompts = [[3 + (i * k) % 97 for i in range(40 + k)] for k in range(1, 4)]
    expected, found = (
        small_engine(adopt_tiny(LLAMA), compile_decode=compiles) for compiles in (False, True)
    )
    assert run(found, prompts) == run(expected, prompts)
    assert run(found, prompts[:1]) == run(expected, prompts[:1])
    assert sealed_state(found).keys() == sealed_state(expected).keys()
    for key, pages in sealed_state(expected).items():
        assert torch.equal(sealed_state(found)[key], pages)


def test_where_it_cannot_serve_it_says_so(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    latent = {"num_key_value_heads": 4, "num_hidden_layers": 2}
    sizes = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    loaded = adopt_tiny(DeepseekV3Config(**sizes | latent | LATENT))
    with pytest.raises(ConfigError, match=mentioning("compile_decode latent")):
        small_engine(loaded, compile_decode=True)
    with pytest.raises(ConfigError, match=mentioning("compile_decode another layer")):
        small_engine(adopt_tiny(tiny_config("gemma3n_text")), compile_decode=True)
    with pytest.raises(ConfigError, match=mentioning("compile_decode tensor_parallel_size 2")):
        EngineConfig(tensor_parallel_size=2, compile_decode=True)
    nowhere = {"cpp.cxx": ("no-such-compiler",)}
    no_compiler = pytest.raises(ConfigError, match=mentioning("compile_decode C++ compiler"))
    with torch._inductor.config.patch(nowhere), no_compiler:
        small_engine(adopt_tiny(LLAMA), compile_decode=True)


def test_models_without_such_layers_or_on_other_devices_are_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    class Headless(PreTrainedModel):
        config_class = LlamaConfig
        device = torch.device("cpu")

    with pytest.raises(ConfigError, match=mentioning("compile_decode Headless")):
        compiled_decode.check_compilable(Headless(LLAMA))
    elsewhere = tiny_model(LLAMA, tokenizer).model.to("meta")
    with pytest.raises(ConfigError, match=mentioning("compile_decode GPU")):
        compiled_decode.check_compilable(elsewhere)


def test_an_older_torch_is_named(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no opaque objects, so the module cannot be imported."""
    monkeypatch.setitem(sys.modules, "tangram.model.compiled_decode", None)
    with pytest.raises(ConfigError, match=mentioning("compile_decode torch")):
        small_engine(adopt_tiny(LLAMA), compile_decode=True)
