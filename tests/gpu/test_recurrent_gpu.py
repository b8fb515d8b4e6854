"""Recurrent layers in passes that are padded and replayed; on a GPU, with the kernels of fla-core.

What needs no GPU runs in Triton's interpreter, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.passes.graphs import PassGraphs
from tangram.errors import ModelError
from tangram.kernels.interface import PaddedShape, PassShape
from tangram.kernels.triton.decode_buffers import DecodeShape
from tangram.model.attention import StepAttention
from tangram.model.load import LoadedModel
from tangram.model.mixer_kernels import find_tuners
from tangram.model.recurrent import PassStates, StateMemory
from tangram.types import SamplingParams
from tests.families import spread_weights
from tests.gpu.test_engine import both, in_step
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.interpreter import interpreter_few
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, sealed_state, small_engine, tiny_model
from tests.tiny_configs import tiny_config

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="says what a GPU computes")
# Kernels multiply matrices of at least 16 rows.
SMALL: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
MIXERS: dict[str, PretrainedConfig] = {
    "qwen3_next": tiny_config("qwen3_next", **SMALL, **HEADS, **MIXED),
    "qwen3_5_text": tiny_config("qwen3_5_text", **SMALL, **HEADS, **MIXED),
    "kimi_linear": tiny_config(
        "kimi_linear", **SMALL | {"num_key_value_heads": 4}, linear_head_dim=32, linear_num_heads=4
    ),
    "granitemoehybrid": tiny_config("granitemoehybrid", **SMALL, **MAMBA),
    "falcon_h1": tiny_config("falcon_h1", **SMALL, **MAMBA, head_dim=16, mamba_d_ssm=128),
    "lfm2": tiny_config("lfm2", **SMALL),
}
CHUNK = 64
ANSWER = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [(7 * at * (number + 1) + at * at) % 90 + 3 for at in range(length)]
    for number, length in enumerate([3, 17, 64, 65, 130, 200, 333])
]
PAIRS = [(1, 5), (2, 28), (3, 40), (4, 21), (5, 33)]  # factors and lengths of prompts
# How far behind the best a chosen token may be, as a part of the largest difference of two logits:
# in float32 the kernels multiply in TF32.
BEHIND = {torch.float32: 0.01, torch.bfloat16: 0.05}


class Replays(PassGraphs):
    """Stands for graphs: a pass runs over the inputs and the states of the first of its shape."""

    def __init__(self, graphs: Any, device: torch.device) -> None:
        super().__init__(graphs, device)
        self.first = dict[PassShape, tuple[Tensor, PassStates | None]]()
        self.replays = list[PassShape]()

    def logits(self, inputs: Tensor, sizes: list[int], attention: StepAttention) -> Tensor:
        shape, given = attention.launch.shape, attention.states
        if shape is None:
            return self._forward(attention, *torch.split(inputs, sizes))
        if shape in self.first:
            self.replays.append(shape)
        kept, attention.states = self.first.setdefault(shape, (inputs.clone(), given))
        logits = self._forward(attention, *torch.split(kept.copy_(inputs), sizes))
        attention.states = given
        return logits


def options_of(loaded: LoadedModel, folder: Path, retention: float = 0.5) -> dict[str, Any]:
    options: dict[str, Any] = {
        "kv_retention": retention,
        "chunk_tokens": 16,
        "max_num_seqs": 3,
        "kv_cache_gib": 4e-3,
        "max_model_len": 100,
        "max_num_batched_tokens": 50,
    }
    if retention < 1.0:
        options["profile"] = (profile_file(loaded, folder, chunk_tokens=16),)
    return options


@pytest.mark.parametrize(
    "name", interpreter_few(["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2"], "qwen3_5_text")
)
def test_passes_over_the_states_of_others_leave_what_torch_leaves(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Three rows decode in the width of four, in slots that change; chunks and tails come alone."""
    loaded = tiny_model(MIXERS[name], load_tokenizer("smollm2"), device)
    engines = both(loaded, options_of(loaded, tmp_path))
    for engine in engines:
        engine._runner.pool.zero_()  # snapshots are compared as numbers
    passes = engines[1]._runner.passes
    passes.graphs = replays = Replays(passes.forward, engines[1].device)
    prompts = [[(k * at * at + at) % 90 + 3 for at in range(length)] for k, length in PAIRS]
    in_step(engines, prompts)
    widths = {shape.tokens for shape in replays.replays if isinstance(shape, DecodeShape)}
    assert 4 in widths and len(widths) > 1
    chunks = [shape for shape in replays.replays if isinstance(shape, PaddedShape)]
    assert all(shape.tokens == 16 for shape in chunks) and bool(chunks) is (name != "kimi_linear")
    assert engines[1].stats().sealed_chunks > 6


@torch.inference_mode()
def lead_of_others(
    loaded: LoadedModel, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> float:
    """How far the tokens of `answers` are behind the best by Transformers' own eager pass."""
    model, most = loaded.model, 0.0
    serving: str = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        behind = (logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))
        most = max(most, float(behind.max()))
    model.set_attn_implementation(serving)
    return most


@on_gpu
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", BEHIND)
@pytest.mark.parametrize("name", MIXERS)
def test_answers_are_those_of_transformers_together_again_and_alone(
    name: str,
    dtype: torch.dtype,
    eager: bool,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = load_tokenizer("smollm2")
    theirs, ours = (tiny_model(MIXERS[name], tokenizer, device, dtype) for _ in range(2))
    for loaded in (theirs, ours):
        spread_weights(loaded.model)
    options: dict[str, Any] = {
        "chunk_tokens": CHUNK,
        "max_num_batched_tokens": 12 * CHUNK,  # some steps have many chunks of a sequence
        "max_model_len": 600,
        "kv_cache_gib": 0.1,
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": eager,
    }
    with caplog.at_level("WARNING", "tangram"):
        engine = small_engine(ours, **options)
    assert "without" not in caplog.text, "its decode passes are captured"
    first = run(engine, PROMPTS, ANSWER)
    before = engine.stats().cached_tokens
    again = run(engine, PROMPTS, ANSWER)
    assert engine.stats().cached_tokens - before == sum(
        (len(prompt) - 1) // CHUNK * CHUNK for prompt in PROMPTS
    )
    alone = [run(engine, [prompt], ANSWER)[0] for prompt in PROMPTS]
    for answers in (first, again, alone):
        assert lead_of_others(theirs, PROMPTS, answers) < BEHIND[dtype]


@on_gpu
@pytest.mark.parametrize("name", MIXERS)
def test_pages_and_states_have_the_same_bits_alone_and_together(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """In two engines: with graphs each chunk is a pass of its own."""
    loaded = tiny_model(MIXERS[name], load_tokenizer("smollm2"), device)
    spread_weights(loaded.model)
    options: dict[str, Any] = {
        "kv_retention": 0.5,
        "profile": (profile_file(loaded, tmp_path, chunk_tokens=CHUNK),),
        "chunk_tokens": CHUNK,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 600,
        "kv_cache_gib": 0.1,
    }
    engine = small_engine(loaded, **options)
    run(engine, PROMPTS, ANSWER)
    together = sealed_state(engine)
    engine = small_engine(loaded, **options)
    for prompt in reversed(PROMPTS):
        run(engine, [prompt], ANSWER)
    alone = sealed_state(engine)
    shared = together.keys() & alone.keys()
    assert len(shared) > 10
    different = [key for key in shared if not torch.equal(together[key], alone[key])]
    assert not different


@on_gpu
@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_drops_a_state_is_refused(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateMemory, "write", lambda *arguments: None)
    with pytest.raises(ModelError, match=mentioning("state break")):
        tiny_model(MIXERS[name], load_tokenizer("smollm2"), device)


@on_gpu
def test_no_kernel_of_a_mixer_chooses_among_configurations(device: torch.device) -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    tiny_model(MIXERS["qwen3_next"], load_tokenizer("smollm2"), device)
    tuners = dict(find_tuners())
    assert "chunk_gated_delta_rule_fwd_kernel_h_blockdim64" in tuners
    assert all(len(tuner.configs) == 1 for tuner in tuners.values())
