"""Bfloat16 linear maps by oneDNN against torch's own, and the purity law of their rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tangram.model.cpu_weights import pack_weights

SHAPES = [(576, 960), (1024, 576), (1536, 576), (16, 7)]  # K, N
pytestmark = pytest.mark.skipif(
    not (
        torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ),
    reason="weights stay as they are on this CPU",
)


def make_maps() -> tuple[nn.Sequential, nn.Sequential]:
    """Some maps as torch has them, and the same packed."""
    torch.manual_seed(0)
    plain, packed = (
        nn.Sequential(*(nn.Linear(k, n, bias=k > n) for k, n in SHAPES)).bfloat16()
        for _ in range(2)
    )
    packed.load_state_dict(plain.state_dict())
    pack_weights(packed)
    assert not any(type(part) is nn.Linear for part in packed)
    return plain, packed


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (0,), (600,)], ids=str)
def test_a_packed_map_gives_what_torch_gives(shape: tuple[int, ...]) -> None:
    with torch.inference_mode():
        for one, other in zip(*make_maps(), strict=True):
            x = torch.randn(*shape, one.in_features).bfloat16()
            torch.testing.assert_close(other(x), one(x))


def test_a_row_does_not_depend_on_the_others_in_its_pass() -> None:
    """A chunk alone, behind decode rows, and among other chunks; and few rows."""
    _, maps = make_maps()
    with torch.inference_mode():
        for part in maps:
            x = torch.randn(2100, part.in_features).bfloat16()
            together = part(x)
            for begin, end in (
                (0, 512),
                (3, 515),
                (512, 1024),
                (1, 2100),
                (7, 8),
                (3, 19),
                (5, 38),
            ):
                assert torch.equal(part(x[begin:end].contiguous()), together[begin:end])
            alone = torch.cat([part(row[None]) for row in x[:300]])
            assert torch.equal(alone, together[:300])


def test_a_packed_model_is_saved_with_its_weights_as_they_were() -> None:
    plain, packed = make_maps()
    for _ in range(2):  # the second time for another engine of the same model
        saved = packed.state_dict()
        assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())
        pack_weights(packed)


def test_float32_maps_and_tied_embeddings_stay_as_they_are() -> None:
    embedding, head = nn.Embedding(50, 16).bfloat16(), nn.Linear(16, 50, bias=False)
    other = nn.Linear(16, 16)
    head.weight = embedding.weight
    expected = embedding.weight.detach().clone()
    parts = nn.ModuleList([embedding, head, other])
    pack_weights(parts)
    assert parts[2] is other and type(parts[1]) is not nn.Linear
    with torch.inference_mode():
        assert torch.equal(embedding(torch.arange(50)), expected)
        torch.testing.assert_close(parts[1](expected), expected @ expected.T)
