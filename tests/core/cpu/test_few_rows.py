"""Linear maps of few rows, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tangram.model.cpu_weights import FewRowsLinear, multiply_few_rows_fast


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (1, 7, 24), (16, 24), (17, 24), (3, 1, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_map(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    source = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        product = FewRowsLinear(source)(x)
        torch.testing.assert_close(product, source(x), rtol=1e-5, atol=1e-6)
        assert product.is_contiguous(), "as attention expects"
        assert FewRowsLinear(source)(x[:0]).shape == (0, *shape[1:-1], 40)


def test_tied_weights_stay_tied_and_other_maps_stay_as_they_are() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(512, 256)
            self.head = nn.Linear(256, 512, bias=False)
            self.head.weight = self.embedding.weight
            self.narrow = nn.Linear(512, 512, dtype=torch.bfloat16)
            self.small = nn.Linear(24, 24)

    model = Model()
    multiply_few_rows_fast(model, 512)
    assert isinstance(model.get_submodule("head"), FewRowsLinear)
    assert model.head.weight is model.embedding.weight
    assert type(model.narrow) is type(model.small) is nn.Linear


def test_a_pass_with_a_chunk_keeps_its_order_of_sums() -> None:
    """The law: entries of a chunk do not depend on how many rows are beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512))
    x = torch.randn(8, 512)
    expected = [model(x[:rows]) for rows in (7, 8)]
    multiply_few_rows_fast(model, 512)  # another engine's, with longer chunks
    multiply_few_rows_fast(model, 8)
    assert torch.equal(model(x), expected[1])
    torch.testing.assert_close(model(x[:7]), expected[0])


@pytest.mark.parametrize("kind", [FewRowsLinear, lambda source: source])
def test_what_other_rows_hold_changes_no_bit(kind: Callable[[nn.Linear], nn.Module]) -> None:
    """In neither product; how many there are may."""
    torch.manual_seed(0)
    part = kind(nn.Linear(576, 960).requires_grad_(False))
    row, others = torch.randn(1, 576), torch.randn(2, 40, 576)
    for count in (1, 2, 7, 16, 40):
        one, other = (part(torch.cat([row, beside[: count - 1]]))[0] for beside in others)
        assert torch.equal(one, other)
