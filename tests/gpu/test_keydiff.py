"""KeyDiff's kernels against the scorer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tangram.compress.scorers import ChunkView
from tangram.compress.scorers.keydiff import KeyDiff


def expect(keys: Tensor) -> Tensor:
    return KeyDiff().score(ChunkView(keys, keys, keys, start=0, layer=0, scaling=1.0))


def keys_in_a_batch(heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Keys [H, C, D] as they lie in a flattened batch, around a common direction."""
    torch.manual_seed(tokens)
    return (
        (torch.randn(tokens + 9, heads, dim) + torch.randn(heads, dim))
        .to(dtype)[4:-5]
        .transpose(0, 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "tokens", "dim"), [(2, 64, 128), (3, 130, 80), (1, 1, 16), (2, 1200, 16)]
)
def test_scores_are_the_scorers(
    heads: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from tangram.kernels.triton import keydiff

    keys = keys_in_a_batch(heads, tokens, dim, dtype).to(device)
    torch.testing.assert_close(keydiff.score(keys[None])[0], expect(keys), rtol=1e-5, atol=1e-6)


def test_zero_and_tiny_keys_score_as_the_scorer_says(device: torch.device) -> None:
    from tangram.kernels.triton import keydiff

    keys = keys_in_a_batch(2, 70, 32, torch.float32).clone()
    keys[0, 3], keys[1], keys[0, 5] = 0.0, 0.0, keys[0, 5] * 1e-14
    scores = keydiff.score(keys.to(device)[None])[0].cpu()
    assert scores[0, 3] == 0.0 and not scores[1].any()
    torch.testing.assert_close(scores, expect(keys), rtol=1e-5, atol=1e-6)


def test_equal_keys_tie_and_strides_do_not_matter(device: torch.device) -> None:
    from tangram.kernels.triton import keydiff

    keys = keys_in_a_batch(2, 150, 32, torch.float32).to(device)
    keys[:, [7, 70, 149]] = keys[:, :1].clone()
    scores = keydiff.score(keys[None])[0]
    assert (scores[:, [7, 70, 149]] == scores[:, :1]).all()
    assert torch.equal(keydiff.score(keys.contiguous()[None])[0], scores)


def test_chunks_scored_together_score_as_alone(device: torch.device) -> None:
    from tangram.kernels.triton import keydiff

    keys = torch.cat(
        [keys_in_a_batch(2, tokens, 32, torch.bfloat16)[:, :70] for tokens in (70, 90, 110)], dim=1
    )
    chunks = keys.to(device).transpose(0, 1).unflatten(0, (3, 70)).transpose(1, 2)
    alone = torch.cat([keydiff.score(chunk[None]) for chunk in chunks])
    assert torch.equal(keydiff.score(chunks), alone)
