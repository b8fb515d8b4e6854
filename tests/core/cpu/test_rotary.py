"""The rotation that scorers undo is the layer's own, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    Glm4Config,
    PretrainedConfig,
    SmolLM3Config,
)

from tangram.compress.scorers import ChunkView
from tangram.compress.scorers.expected_attention import ExpectedAttention
from tangram.compress.scorers.rotation import unrotate
from tangram.engine.setup.observe import chunk_source
from tangram.errors import ModelError
from tangram.model.load import LoadedModel
from tangram.model.rotary import layer_rotaries
from tests.edge.cpu.test_architectures import BASE, CONFIGS, SLIDING
from tests.mentions import mentioning
from tests.small_engines import small_engine

READING = BASE | {"vocab_size": 49_152}  # as many as the tokenizer has
INTERLEAVED = {"glm4": Glm4Config(**READING), "cohere": CohereConfig(**READING)}
WINDOWS = {"layer_types": SLIDING, "sliding_window": 40}
# Their layers 1 and 3 have no rotation.
STILL: dict[str, PretrainedConfig] = {
    "smollm3": SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1, 0]),
    "cohere2": Cohere2Config(**BASE, **WINDOWS),
    "exaone4": Exaone4Config(**BASE, **WINDOWS),
}


class Queries:
    """Stands in for a step's attention and keeps the queries of each layer."""

    def __init__(self) -> None:
        self.taken: dict[int, Tensor] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Zeros, so that no layer's input depends on a position."""
        self.taken[int(module.layer_idx)] = q.transpose(0, 1)  # type: ignore[arg-type]
        return torch.zeros_like(q)


# No scorer that rotates back serves latents.
HEADS = {name: config for name, config in CONFIGS.items() if not hasattr(config, "kv_lora_rank")}


@pytest.mark.parametrize("name", [*HEADS, *STILL])
def test_undoing_the_rotation_gives_the_queries_of_position_zero(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny((HEADS | STILL)[name])
    full = loaded.geometry.full_layers
    if not full:
        pytest.skip("sliding-window layers only: nothing is compressed")
    tokens, positions = torch.tensor([[5, 9, 17, 3]]), torch.tensor([[0, 7, 130, 400]])
    rotated, still = Queries(), Queries()
    with torch.inference_mode():
        for places, queries in ((positions, rotated), (torch.zeros_like(positions), still)):
            loaded.model(input_ids=tokens, position_ids=places, use_cache=False, tangram=queries)
    rotaries = layer_rotaries(loaded.model, loaded.geometry)
    assert list(rotaries) == list(full)
    for layer, rotary in rotaries.items():
        factor = rotary(torch.tensor([0]))[0][0, 0]  # YaRN multiplies the cosine of angle zero too
        turned = not torch.allclose(rotated.taken[layer], still.taken[layer], atol=1e-2)
        assert turned == (name not in STILL or layer in (0, 2))
        undone = unrotate(rotated.taken[layer], *rotary(positions[0]))
        torch.testing.assert_close(undone, still.taken[layer] / factor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", STILL)
def test_a_layer_without_rotation_expects_the_queries_of_its_chunk(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    """Expected Attention by its definition, in float64, without a rotation."""
    loaded, seen = adopt_tiny(STILL[name]), dict[int, tuple[ChunkView, Tensor]]()
    scorer = ExpectedAttention(sinks=0)

    def note(chunk: ChunkView, scores: Tensor) -> None:
        seen[chunk.layer] = chunk, scores

    for _ in chunk_source(loaded, scorer, note, chunk_tokens=32)(range(3, 67)):
        for layer in (1, 3):
            chunk, scores = seen[layer]
            expected = torch.zeros(3, 32, dtype=torch.float64)
            for number, queries in enumerate(chunk.queries.double()):
                mean, spread = queries.mean(dim=0), torch.cov(queries.T, correction=0)
                key = chunk.keys[number // 2].double()
                quadratic = (key @ spread * key).sum(dim=1)
                logits = chunk.scaling * key @ mean + chunk.scaling**2 / 2 * quadratic
                expected[number // 2] += logits.softmax(dim=0) / 2
            expected = (expected + 0.01) * chunk.values.double().norm(dim=-1)
            torch.testing.assert_close(scores, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_model_that_rotates_otherwise_is_refused_by_scorers_that_undo_it(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(INTERLEAVED[name])
    assert small_engine(loaded)
    with pytest.raises(ModelError, match=mentioning("layer 0 halves")):
        small_engine(loaded, kv_retention=0.5, scorer="expected_attention")
