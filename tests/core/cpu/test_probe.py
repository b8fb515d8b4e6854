"""What a model is asked before it is served: a claim that no layer shows cannot pass in silence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tangram.errors import ModelError
from tangram.model.attention import IMPLEMENTATION
from tangram.model.load import load_model
from tangram.model.servable import probe_model
from tangram.sizing.cache_size import kv_size
from tests.families import spread_weights
from tests.mentions import mentioning
from tests.tiny_configs import WINDOW, tiny_config


def make(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), attn_implementation=IMPLEMENTATION, dtype=torch.float32
    )
    return model.train(False)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("phimoe", {}, [WINDOW] * 4),
        ("phimoe", {"sliding_window": None}, [None] * 4),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "max_window_layers": 2},
            [WINDOW, None, None, None],  # its layer types, of the first layers every other
        ),
        ("qwen2_moe", {"use_sliding_window": False}, [None] * 4),
        ("mistral", {"sliding_window": 512}, [None] * 4),
        ("mistral", {"sliding_window": 511}, [511] * 4),
        ("llama4_text", {}, [32, 32, 32, None]),
        ("llama4_text", {"attention_chunk_size": 100}, [100, 100, 100, None]),  # 512 end within one
    ],
)
def test_the_mask_says_which_window_a_layer_has(
    model_type: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    """PhiMoE and Qwen2-MoE tell attention of no window; one of 512 shows 512 positions whole."""
    model = make(model_type, **changes)
    assert list(probe_model(model)[0].windows) == windows
    assert list(kv_size(model.config.to_dict(), 512).shape.windows) == windows
    assert model.config._attn_implementation == IMPLEMENTATION, "it serves without masks"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "gemma2", "qwen3_moe"])
def test_rounding_to_16_bits_refuses_no_model(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), load_format="dummy", dtype="bfloat16", device="cpu")
    spread_weights(loaded.model)
    assert probe_model(loaded.model)[0] == loaded.geometry


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"is_causal": False}, "layer 0 after"),
        ("doge", {}, "layer 0 mask positions"),
        ("moshi", {}, "layer 0 mask 40"),
        ("deepseek_v32", {}, "layer 0 indices"),
        ("bart", {"is_encoder_decoder": False}, "place"),
        ("hrm_text", {}, "4 32"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                },
            },
            "longest position",
        ),
        ("stablelm", {}, "keyword"),
        ("diffllama", {}, "4 8"),
    ],
)
def test_what_is_not_served_is_refused_whatever_the_config_says(
    model_type: str, changes: dict[str, Any], named: str
) -> None:
    """`refuse_unsupported` is not asked here."""
    with pytest.raises(ModelError, match=mentioning(f"{model_type} {named}")):
        probe_model(make(model_type, **changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k, v + 0.2 * v.roll(1, 1)),
        lambda q, k, v: (q / 1.1, k, v),
        lambda q, k, v: (q, k, v.tanh()),
    ],
)
def test_a_part_of_attention_that_no_option_names_is_found(
    change: Callable[..., tuple[Tensor, Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    home = sys.modules[type(model).__module__]
    own = home.eager_attention_forward

    def eager(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> Any:
        return own(module, *change(q, k, v), *rest, **options)

    probe_model(model)
    monkeypatch.setattr(home, "eager_attention_forward", eager)
    with pytest.raises(ModelError, match=mentioning("layer 0 eager")):
        probe_model(model)


@pytest.mark.parametrize(("model_type", "option"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_an_option_that_a_layer_keeps_to_itself_is_found(
    model_type: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its eager attention has it all the same."""
    model = make(model_type)
    home = sys.modules[type(model).__module__]
    own = home.eager_attention_forward
    taken = "sinks" if option == "s_aux" else None

    def eager(module: Any, *rest: Any, **options: Any) -> Any:
        return own(module, *rest, **(options | {option: 50.0 if taken is None else module.sinks}))

    probe_model(model)
    monkeypatch.setattr(home, "eager_attention_forward", eager)
    call = home.ALL_ATTENTION_FUNCTIONS.get_interface

    def silent(name: str, default: Any) -> Any:
        interface = call(name, default)
        return lambda *rest, **options: interface(*rest, **(options | {option: None}))

    monkeypatch.setattr(home.ALL_ATTENTION_FUNCTIONS, "get_interface", silent)
    with pytest.raises(ModelError, match=mentioning("eager")):
        probe_model(model)


def test_tokens_that_reach_each_other_but_by_attention_are_found() -> None:
    model = make("llama")

    def shift(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden + 0.5 * hidden.roll(1, 1), *others

    spread_weights(model)
    last = model.get_decoder().layers[3]  # type: ignore[no-untyped-call]
    hook = last.mlp.register_forward_pre_hook(shift)
    with pytest.raises(ModelError, match=mentioning("logits tokens")):
        probe_model(model)
    hook.remove()
    last.self_attn.q_proj.register_forward_pre_hook(shift)
    with pytest.raises(ModelError, match=mentioning("queries keys values tokens")):
        probe_model(model)


def test_logits_that_nobody_asked_for_are_found() -> None:
    model = make("llama")

    def forget(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, options | {"logits_to_keep": 0}

    model.register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(ModelError, match=mentioning("logits [1, 4, 96] 3")):
        probe_model(model)


@pytest.mark.parametrize(
    "error", [AssertionError, KeyError, NotImplementedError, ZeroDivisionError]
)
def test_whatever_a_model_raises_is_a_refusal_in_one_line(error: type[Exception]) -> None:
    model = make("llama")

    def fail(*inputs: Any) -> None:
        raise error("one\ntwo")

    model.get_decoder().layers[1].register_forward_pre_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=mentioning(f"llama {error.__name__}")) as found:
        probe_model(model)
    assert "\n" not in str(found.value)
    assert model.config._attn_implementation == IMPLEMENTATION
