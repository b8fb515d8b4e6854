"""The gate's kernel against the gate in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tangram.compress.scorers.gate import NORM_EPSILON, GateShape, gate_scores


def random_layer(shape: GateShape, device: torch.device) -> dict[str, Tensor]:
    """A layer's weights, exact in float16 as those of a file."""
    torch.manual_seed(shape.hidden)
    return {
        name: torch.randn(size).half().float().to(device)
        for name, size in shape.tensor_shapes().items()
    }


SHAPES = {
    "embedded model": GateShape(1, 96, kv_heads=3, group_size=3, head_dim=64, sinks=16),
    "odd sizes": GateShape(1, 70, kv_heads=2, group_size=1, head_dim=20, sinks=5),
    "many sinks": GateShape(1, 64, kv_heads=1, group_size=4, head_dim=128, sinks=33),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_scores_are_the_gates(name: str, dtype: torch.dtype, device: torch.device) -> None:
    from tangram.kernels.triton import gate

    shape = SHAPES[name]
    weights = random_layer(shape, device)
    hidden = torch.randn(75, shape.hidden, device=device).to(dtype)
    scores = gate.score(weights, hidden, 1, NORM_EPSILON)[0]
    torch.testing.assert_close(scores, gate_scores(weights, shape, hidden), rtol=1e-4, atol=1e-6)
    assert scores.std() > 0.01


@pytest.mark.parametrize("chunk", [50, 64])
def test_chunks_scored_together_score_as_alone(chunk: int, device: torch.device) -> None:
    from tangram.kernels.triton import gate

    shape = SHAPES["embedded model"]
    weights = random_layer(shape, device)
    hidden = torch.randn(3, chunk, shape.hidden, device=device).to(torch.bfloat16)
    alone = torch.cat([gate.score(weights, own, 1, NORM_EPSILON) for own in hidden])
    together = gate.score(weights, hidden.flatten(0, 1), 3, NORM_EPSILON)
    # The interpreter's product is NumPy's, which on some CPUs rounds a row by its place in a tile
    # of 32: that of a token moves if chunks are no multiple of it.
    rounding = 1e-5 if device.type == "cpu" and chunk % 32 else 0.0
    torch.testing.assert_close(together, alone, rtol=rounding, atol=0.0)


def test_a_row_of_a_wider_tensor_is_read_by_its_stride(device: torch.device) -> None:
    from tangram.kernels.triton import gate

    shape = SHAPES["odd sizes"]
    weights = random_layer(shape, device)
    wide = torch.randn(40, shape.hidden + 9, device=device)
    narrow = wide[:, : shape.hidden]
    assert torch.equal(
        gate.score(weights, narrow, 1, NORM_EPSILON),
        gate.score(weights, narrow.contiguous(), 1, NORM_EPSILON),
    )
