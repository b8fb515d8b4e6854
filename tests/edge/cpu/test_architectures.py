"""Every supported architecture, as a tiny random model, gives the logits of Transformers' own eager
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tangram.errors import ModelError
from tangram.model import prepare
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.small_engines import GREEDY, LATENT, profile_file, run, small_engine
from tests.tiny_configs import tiny_config

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {name: value for name, value in BASE.items() if name != "head_dim"} | LATENT
MLA |= {"num_key_value_heads": 6}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**BASE),
    "llama_one_kv_head": LlamaConfig(**(BASE | {"num_key_value_heads": 1})),
    "mistral": MistralConfig(**BASE, sliding_window=None),
    "mistral_sliding": MistralConfig(**BASE, sliding_window=40),
    "qwen2": Qwen2Config(**BASE),
    "qwen3": Qwen3Config(**BASE),
    "qwen3_moe": Qwen3MoeConfig(
        **BASE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "qwen2_moe_sliding": Qwen2MoeConfig(
        **BASE,
        use_sliding_window=True,
        max_window_layers=3,
        sliding_window=40,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "phimoe_sliding": PhimoeConfig(
        **BASE, sliding_window=40, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma3": Gemma3TextConfig(
        **BASE,
        layer_types=SLIDING,
        sliding_window=40,
        query_pre_attn_scalar=8,
        tie_word_embeddings=False,
    ),
    "gemma3n": tiny_config("gemma3n_text", activation_sparsity_pattern=[0.5] + [0.0] * 5),
    "gpt_oss": GptOssConfig(
        **BASE, layer_types=SLIDING, sliding_window=24, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v2": DeepseekV2Config(**(MLA | {"q_lora_rank": None})),
    "deepseek_v3": DeepseekV3Config(**MLA),
    "glm4_moe_lite": Glm4MoeLiteConfig(**MLA),
}
WINDOWS_ONLY = {"mistral_sliding", "phimoe_sliding"}
PROMPTS = [[5, 9, 17, 3], list(range(3, 93)), [(7 * i) % 90 + 3 for i in range(150)]]


def eager_continuation(
    loaded: LoadedModel, prompt: list[int], tokens: int
) -> tuple[list[int], float]:
    """Greedy tokens of the model's own eager attention without a cache, and the smallest lead of a
    choice.
    """
    loaded.model.set_attn_implementation("eager")
    ids, lead = list(prompt), float("inf")
    try:
        with torch.inference_mode():
            for _ in range(tokens):
                logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                best = logits.topk(2).values
                lead = min(lead, float(best[0] - best[1]))
                ids.append(int(logits.argmax()))
    finally:
        loaded.model.set_attn_implementation("tangram")
    return ids[len(prompt) :], lead


@pytest.mark.parametrize("name", CONFIGS)
def test_uncompressed_serving_equals_eager_attention(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(CONFIGS[name])
    continued = [eager_continuation(loaded, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    answers = run(small_engine(loaded), PROMPTS)  # it changes the model's maps
    for (expected, lead), answer in zip(continued, answers, strict=True):
        assert lead > 1e-4, "a near-tie decides nothing: choose another seed"
        assert answer == expected


def test_the_tokens_that_fit_count_a_window_once_a_sequence(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    engine = small_engine(adopt_tiny(CONFIGS["gpt_oss"]), max_model_len=256)
    stats, layout = engine.stats(), engine.layout
    assert stats.capacity_tokens == stats.capacity_uncompressed_tokens
    assert stats.capacity_tokens == layout.tokens_in(stats.pages_total, 256)
    promised = layout.count_promised_pages(256, 256)
    assert stats.capacity_tokens // 256 == stats.pages_total // promised > 0
    assert stats.capacity_tokens > 1.5 * stats.pages_total * 32 // layout.span_pages


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WINDOWS_ONLY])
def test_every_architecture_is_served_compressed(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    loaded = adopt_tiny(CONFIGS[name])
    options = {"kv_retention": 0.5, "profile": (profile_file(loaded, tmp_path),)}
    together = run(small_engine(loaded, **options), PROMPTS)
    alone = [run(small_engine(loaded, **options), [prompt])[0] for prompt in PROMPTS]
    assert together == alone
    assert together != run(small_engine(loaded), PROMPTS), "compression changed nothing: is it on?"


@pytest.mark.parametrize("name", CONFIGS)
def test_joined_projections_and_steps_launched_ahead_change_nothing(
    name: str,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Penalties make a token depend on those before it, also while they are under way."""
    loaded = adopt_tiny(CONFIGS[name])
    params = SamplingParams(
        temperature=0.8, seed=3, frequency_penalty=0.5, max_tokens=20, ignore_eos=True
    )
    with monkeypatch.context() as apart:
        others = tuple(step for step in prepare.STEPS if step.name != "join")
        apart.setattr(prepare, "STEPS", others)
        expected = [run(small_engine(loaded), PROMPTS, params) for params in (GREEDY, params)]
    linear = sum(type(module) is torch.nn.Linear for module in loaded.model.modules())
    engine = small_engine(loaded)
    assert sum(type(module) is torch.nn.Linear for module in loaded.model.modules()) < linear
    monkeypatch.setattr(engine, "ahead", True)
    assert [run(engine, PROMPTS, params) for params in (GREEDY, params)] == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LlamaConfig(**BASE, index_topk=16), "index_topk"),
        (Qwen3Config(**BASE, attention_chunk_size=64), "attention_chunk_size"),
    ],
)
def test_models_that_would_be_silently_wrong_are_refused_by_name(
    config: PretrainedConfig, named: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    with pytest.raises(ModelError, match=named):
        adopt_tiny(config)
