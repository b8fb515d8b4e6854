"""What a layer's attention sees of the model around it: its rotation, and its input."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engines import fork


def rotate_behind_the_table() -> None:
    """A table that was cut goes on as the whole one does, with YaRN's factor, too."""
    import torch
    from torch import nn
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
        YaRNScalingRotaryEmbedding,
    )

    from tangram_vllm.surroundings import Surroundings

    known = {"rotary_dim": 16, "base": 1e4, "dtype": torch.float32}
    with set_current_vllm_config(VllmConfig()):
        shape = {"head_size": 32, "max_position_embeddings": 200}
        plain = RotaryEmbedding(**shape, **known, is_neox_style=True)
        scaled = YaRNScalingRotaryEmbedding(
            **shape, **known, is_neox_style=True, scaling_factor=4.0
        )
        interleaved = RotaryEmbedding(**shape, **known, is_neox_style=False)
    parent = nn.Module()
    for embed in (plain, scaled):
        parent.rotary_emb, whole = embed, embed.cos_sin_cache
        embed.cos_sin_cache = whole[:120]
        rotary = Surroundings(parent).find_rotary()
        assert rotary is not None
        positions = torch.tensor([0, 5, 119, 120, 121, 199])
        cos, sin = whole[positions].chunk(2, dim=-1)
        for found, expected in zip(rotary(positions), (cos, sin), strict=True):
            torch.testing.assert_close(found, expected.repeat(1, 2), rtol=1e-4, atol=1e-5)
    parent.rotary_emb = interleaved
    assert Surroundings(parent).find_rotary() is None
    assert Surroundings(nn.Module()).find_rotary() is None


def see_what_a_module_is_called_with() -> None:
    import torch
    from torch import Tensor, nn

    from tangram.errors import IntegrityError
    from tangram_vllm.surroundings import Surroundings

    class Module(nn.Module):
        def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
            return hidden_states

    module, hidden = Module(), torch.ones(3, 2)
    around = Surroundings(module)
    assert around.has_hidden and not Surroundings(nn.Linear(2, 2)).has_hidden
    around.watch()
    for call in (lambda: module(hidden, hidden_states=hidden), lambda: module(None, hidden)):
        call()
        assert around.take_hidden() is hidden
    with pytest.raises(IntegrityError, match="Module was called past its hooks"):
        around.take_hidden()


@pytest.mark.parametrize("work", [rotate_behind_the_table, see_what_a_module_is_called_with])
def test_surroundings(work: Callable[[], None]) -> None:
    done = fork(work, {})
    assert done.succeeded, done.log
