"""Linear maps by oneDNN against torch's own, and the purity law of their rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tangram.model.onednn import pack_weights

SHAPES = [(576, 960), (576, 576), (1536, 576), (16, 7)]  # K, N
pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="weights stay as they are"
)


def make_maps(dtype: torch.dtype) -> tuple[nn.Sequential, nn.Sequential]:
    """Some maps as torch has them, and the same packed."""
    torch.manual_seed(0)
    plain, packed = (
        nn.Sequential(*(nn.Linear(k, n, bias=k > n) for k, n in SHAPES)).to(dtype) for _ in range(2)
    )
    packed.load_state_dict(plain.state_dict())
    pack_weights(packed)
    return plain, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (0,), (600,)], ids=str)
def test_a_packed_map_gives_what_torch_gives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    with torch.inference_mode():
        for one, other in zip(*make_maps(dtype), strict=True):
            x = torch.randn(*shape, one.in_features).to(dtype)
            torch.testing.assert_close(other(x), one(x), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_chunk_does_not_depend_on_the_others_in_its_pass(dtype: torch.dtype) -> None:
    """A chunk of 512 tokens alone, behind decode rows, and among other chunks; and few rows."""
    _, maps = make_maps(dtype)
    with torch.inference_mode():
        for part in maps:
            x = torch.randn(2100, part.in_features).to(dtype)
            together = part(x)
            for begin, end in ((0, 512), (3, 515), (512, 1024), (1, 2100), (5, 7), (3, 19)):
                assert torch.equal(part(x[begin:end].contiguous()), together[begin:end])


def test_a_packed_model_is_saved_with_its_weights_as_they_were() -> None:
    plain, packed = make_maps(torch.float32)
    assert any(type(part) is not nn.Linear for part in packed)
    saved = packed.state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())
    pack_weights(packed)  # another engine of the same model
    saved = packed.state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())


def test_an_embedding_that_is_tied_to_a_map_keeps_its_rows() -> None:
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    expected = embedding.weight.detach().clone()
    pack_weights(nn.ModuleList([embedding, head]))
    with torch.inference_mode():
        assert torch.equal(embedding(torch.arange(50)), expected)
        torch.testing.assert_close(head(expected), expected @ expected.T)
