"""A tiny config of every causal language model of Transformers, by the names of fields alone.

A field that many configs have is made small by its name. What a family needs besides has a line in
`_OWN`, with the reason where it is not a count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
WINDOW = 40
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 4, 6, 3, 8


def _fill(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_SMALL: dict[str, Any] = {
    **_fill(
        VOCABULARY,
        "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size",
    ),
    **_fill(
        _HEADS * _HEAD_DIM,
        "hidden_size n_embd d_model emb_dim embedding_size embed_dim "
        "adapter_in_dim adapter_out_dim adapter_input_size",
    ),
    **_fill(
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks",
    ),
    **_fill(
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads swa_num_attention_heads",
    ),
    **_fill(_KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    **_fill(_HEAD_DIM, "head_dim kv_channels v_head_dim global_head_dim swa_head_dim"),
    **_fill(
        64,
        "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
        "intermediate_size_mlp dense_intermediate_size mlp_dim dff",
    ),
    **_fill(32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_fill(4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    **_fill(2, "num_experts_per_tok moe_topk top_k num_experts_per_token moe_k"),
    **_fill(1, "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace"),
    **_fill(
        512,
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length "
        "model_max_length",
    ),
    **_fill(WINDOW, "sliding_window attention_window window_size attention_chunk_size"),
    **_fill(16, "qk_nope_head_dim index_topk image_size num_position_embeddings patch_size"),
    **_fill(8, "qk_rope_head_dim hidden_size_per_layer_input laurel_rank index_head_dim"),
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "index_n_heads": 2,
    "rotary_dim": 4,
    "num_dense_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_expand": 2}
# The default layers are as many that no attention is among the first four.
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Layers with full attention have one wide KV head, whose keys are its values. Two read others.
_GEMMA_4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
_ASSISTED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": _LAYERS,
    "num_kv_shared_layers": _LAYERS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
# By the type of the config, which may be a part of another one.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _MIXED,
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, **_MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _MIXED,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": _KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "diffllama": {"num_key_value_heads": 2},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * _LAYERS},
    "gemma3n_text": {  # two layers read the keys and values of others
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_assistant": {"text_config": _ASSISTED},
    "gemma4_text": _GEMMA_4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    # As published; the default has attention alone.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "attention_chunk_size": 32,
        "floor_scale": 16,
    },  # chunks of whole chunks of ours
    "mamba2": {"num_heads": 6, "head_dim": 16},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> tuple[str, ...]:
    """The types that `AutoModelForCausalLM` takes, those with pictures and sound among them."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def has_field(model_type: str, field: str) -> bool:
    """Whether the config of a model type has `field`."""
    return field in _fields(CONFIG_MAPPING[model_type])


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config of few and small layers, with a window of `WINDOW` tokens where it has windows."""
    return _shrink(CONFIG_MAPPING[model_type], changes)


def _shrink(kind: type[PretrainedConfig], changes: dict[str, Any]) -> PretrainedConfig:
    fields = _fields(kind)
    small = {name: value for name, value in _SMALL.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        small["num_key_value_heads"] = _HEADS  # latents are expanded for each query head
    small |= _OWN.get(kind.model_type, {}) | changes
    inner = {name: _shrink(part, {}) for name, part in _parts(kind, small)}
    return kind(**(inner | small))


def _fields(kind: type[PretrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def _parts(
    kind: type[PretrainedConfig], known: Container[str]
) -> Iterable[tuple[str, type[PretrainedConfig]]]:
    for name, part in kind.sub_configs.items():
        if name not in known:
            yield name, type(getattr(kind(), name)) if part is AutoConfig else part
