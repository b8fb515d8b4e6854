"""What is refused: each row of the table by what asks for it, and whole engines at their start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode

from engines import CHUNK, attempt, tiny_options, tiny_profile
from tangram.compress.profile import Profile, ScorerSpec
from tangram.errors import ConfigError
from tangram_vllm import refusals
from tangram_vllm.refusals import REFUSALS, EngineWish, LayerWish, refuse_unserved


def config(**changes: Any) -> Any:
    """The parts of vLLM's config that the table reads, with `changes` as part__field."""
    parts: dict[str, Any] = {
        "additional_config": {},
        "cache_config": SimpleNamespace(
            block_size=CHUNK, cache_dtype="auto", kv_offloading_size=None
        ),
        "model_config": SimpleNamespace(use_mla=False, is_hybrid=False),
        "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(world_size=1),
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "use_v2_model_runner": False,
        "compilation_config": SimpleNamespace(mode=CompilationMode.NONE),
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(parts[part], field, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def drafts(method: str) -> Any:
    return SimpleNamespace(method=method)


def scored_by(scorer: str) -> Profile:
    spec = ScorerSpec(scorer, {})
    return tiny_profile().model_copy(update={"scorer": spec})


PLAIN = LayerWish()
CASES: dict[str, EngineWish] = {
    "options in --additional-config": EngineWish(
        config(additional_config={"tangram": {}}), PLAIN, None
    ),
    "a block size that is not the profile's chunk": EngineWish(
        config(cache_config__block_size=128), PLAIN, tiny_profile()
    ),
    "a block size that is no multiple of 16": EngineWish(
        config(cache_config__block_size=24), PLAIN, None
    ),
    "a scorer with a second pass": EngineWish(config(), PLAIN, scored_by("kvzip")),
    "a scorer of hidden states in a compiled model": EngineWish(
        config(compilation_config__mode=CompilationMode.VLLM_COMPILE), PLAIN, scored_by("fastkvzip")
    ),
    "hidden states of this model": EngineWish(
        config(), LayerWish(has_hidden=False), scored_by("fastkvzip")
    ),
    "a scorer that undoes the rotation of this model": EngineWish(
        config(), LayerWish(rotates_halves=False), scored_by("expected_attention")
    ),
    "latents (MLA)": EngineWish(config(model_config__use_mla=True), PLAIN, None),
    "sliding windows": EngineWish(config(), LayerWish(sliding_window=128), None),
    "layers of another kind than attention": EngineWish(
        config(model_config__is_hybrid=True), PLAIN, None
    ),
    "ALiBi": EngineWish(config(), LayerWish(alibi=True), None),
    "attention of an encoder": EngineWish(config(), LayerWish(attention="encoder"), None),
    "layers that share their cache": EngineWish(config(), LayerWish(shares_cache=True), None),
    "arguments that the kernels do not know": EngineWish(
        config(), LayerWish(others=("chunk_lookback",)), None
    ),
    "a KV cache of another dtype than the model": EngineWish(
        config(cache_config__cache_dtype="fp8"), PLAIN, None
    ),
    "KV connectors and offload": EngineWish(config(kv_transfer_config=object()), PLAIN, None),
    "several devices": EngineWish(config(parallel_config__world_size=2), PLAIN, None),
    "drafts that have a KV cache": EngineWish(
        config(speculative_config=drafts("eagle")), PLAIN, None
    ),
    "drafts with async scheduling": EngineWish(
        config(scheduler_config__async_scheduling=True, speculative_config=drafts("ngram")),
        PLAIN,
        None,
    ),
    "model runner V2": EngineWish(config(use_v2_model_runner=True), PLAIN, None),
}


def test_what_is_served_is_not_refused() -> None:
    refuse_unserved(EngineWish(config(), PLAIN, None))
    refuse_unserved(EngineWish(config(speculative_config=drafts("ngram")), PLAIN, tiny_profile()))


def test_every_row_has_a_case() -> None:
    of_versions = {"another minor version of vLLM"}
    assert {row.name for row in REFUSALS} == CASES.keys() | of_versions


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse_unserved(CASES[name])
    reason = next(row.reason for row in REFUSALS if row.name == name)
    assert str(error.value) == f"tangram-vllm does not serve {name}: {reason}"


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "__version__", "0.33.1")
    with pytest.raises(ConfigError, match=r"another minor version of vLLM: .* install vLLM 0.32"):
        refuse_unserved(EngineWish(config(), PLAIN, None))
    refuse_unserved(EngineWish(config(), PLAIN, None, untested_vllm=True))


def test_an_engine_that_is_not_served_does_not_start(
    tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    outcome, log = attempt({**tiny, "block_size": 128}, [], half)
    assert outcome is None
    assert "does not serve a block size that is not the profile's chunk" in log


def test_hidden_states_are_refused_where_a_model_is_compiled(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    options = tiny_options(tmp_path, "fastkvzip")
    outcome, log = attempt({**tiny, "enforce_eager": False}, [], options)
    assert outcome is None
    assert "does not serve a scorer of hidden states in a compiled model" in log


def test_a_profile_of_another_model_is_refused(tiny: dict[str, Any]) -> None:
    other = {"profile": "smollm2.keydiff.model.c512.r0.5.json"}
    outcome, log = attempt({**tiny, "block_size": 512}, [], other)
    assert outcome is None
    assert "the profile does not fit: layers is 30 in the profile, 3 in the model" in log


def test_latents_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """vLLM has other backends for them, which would serve without the plugin and not say so."""
    from transformers import DeepseekV2Config

    DeepseekV2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=2,
        first_k_dense_replace=2,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        architectures=["DeepseekV2ForCausalLM"],
        max_position_embeddings=512,
    ).save_pretrained(tmp_path)
    engine = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
    }
    outcome, log = attempt(engine, [], {})
    assert outcome is None
    assert "does not serve latents (MLA)" in log, log[-3000:]
