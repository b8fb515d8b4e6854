"""A model and its KV cache in bfloat16 on a CPU: the purity law holds there, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from tangram.kernels.cpu import compiled_attention
from tangram.model.cpu_weights import is_packable
from tangram.types import SamplingParams
from tests.core.cpu.test_purity import TINY, TINY_LATENT, LonePrompts
from tests.small_engines import run, sealed_state, tiny_model

CHUNK = 32
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=[TINY, TINY_LATENT], ids=["heads", "latents"])
def world(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> LonePrompts:
    loaded = tiny_model(request.param, tokenizer, dtype=torch.bfloat16)
    return LonePrompts(loaded, tmp_path_factory.mktemp("profiles"), "keydiff", CHUNK)


def test_sealed_pages_do_not_depend_on_what_else_runs(world: LonePrompts) -> None:
    """Prompts that share a chunk, at once and one after the other; some chunks decode completes."""
    shared = [3 + (i * 5) % 9 for i in range(CHUNK + 9)]
    prompts = [(*shared, *(3 + (i * k) % 11 for i in range(40))) for k in range(1, 5)]
    together = world.engine()
    assert compiled_attention.runs_compiled(together._runner.pool)
    answers = run(together, prompts, LONG)
    found = sealed_state(together)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = world.engine()
        run(alone, [(*prompt, *answer)], ONE)
        expected = sealed_state(alone)
        assert len(expected.keys() & found.keys()) >= 3
        for key in expected.keys() & found.keys():
            assert torch.equal(found[key], expected[key])


def test_the_map_that_decode_absorbs_is_not_packed(world: LonePrompts) -> None:
    """Packed weights are opaque, and decode reads those of this map as a matrix."""
    world.engine()
    model = world.loaded.model
    absorbed = [part for name, part in model.named_modules() if name.endswith("kv_b_proj")]
    assert bool(absorbed) == (model.config.model_type == TINY_LATENT.model_type)
    assert not any(is_packable("layers.0.self_attn.kv_b_proj", part) for part in absorbed)
    plain = nn.Linear(4, 4).bfloat16()
    assert is_packable("layers.0.self_attn.o_proj", plain)
    assert all(type(part) is nn.Linear and part.weight.layout is torch.strided for part in absorbed)
