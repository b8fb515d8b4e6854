"""The rotation that scorers undo is the model's own, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cohere2Config, Glm4Config, PretrainedConfig

from tangram.compress.scorers.rotation import unrotate
from tangram.errors import ModelError
from tangram.model.load import LoadedModel
from tangram.model.rotary import model_rotary
from tests.edge.cpu.test_architectures import BASE, CONFIGS
from tests.small_engines import small_engine

READING = BASE | {"vocab_size": 49_152}  # as many as the tokenizer has
INTERLEAVED = {
    "glm4": Glm4Config(**READING),
    "cohere2": Cohere2Config(**READING, layer_types=["full_attention"] * 4),
}


class Queries:
    """Stands in for a step's attention and keeps the queries of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.taken = torch.empty(0)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Zeros, so that no layer's input depends on a position."""
        if module.layer_idx == self.layer:
            self.taken = q
        return torch.zeros_like(q)


# No scorer that rotates back serves latents.
HEADS = [name for name, config in CONFIGS.items() if not hasattr(config, "kv_lora_rank")]


@pytest.mark.parametrize("name", HEADS)
def test_undoing_the_rotation_gives_the_queries_of_position_zero(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(CONFIGS[name])
    if not loaded.geometry.full_layers:
        pytest.skip("sliding-window layers only: nothing is compressed")
    tokens, positions = torch.tensor([[5, 9, 17, 3]]), torch.tensor([[0, 7, 130, 400]])
    taken = []
    for places in (positions, torch.zeros_like(positions)):
        queries = Queries(loaded.geometry.full_layers[-1])
        with torch.inference_mode():
            loaded.model(input_ids=tokens, position_ids=places, use_cache=False, tangram=queries)
        taken.append(queries.taken.transpose(0, 1))
    rotated, still = taken
    rotary = model_rotary(loaded.model, loaded.geometry.head_dim)
    factor = rotary(torch.tensor([0]))[0][0, 0]  # YaRN multiplies the cosine of angle zero too
    assert not torch.allclose(rotated, still, atol=1e-2)
    torch.testing.assert_close(
        unrotate(rotated, *rotary(positions[0])), still / factor, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_model_that_rotates_otherwise_is_refused_by_scorers_that_undo_it(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(INTERLEAVED[name])
    assert small_engine(loaded)
    with pytest.raises(ModelError, match="halves"):
        small_engine(loaded, kv_retention=0.5, scorer="expected_attention")
