"""What planners are told of a card before a policy is measured on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tangram.kernels.card_cost import RESERVED_BYTES, count_programs, estimate_cost
from tangram.kernels.packed import TILES
from tangram.kernels.tiling import Operands, count_shared_bytes, fit_tile
from tangram.plan.cost import CostModel
from tests.gpu.cards import CARDS

BFLOAT16, FP8 = torch.bfloat16, torch.uint8


def pool_of(dim: int, dtype: torch.dtype = BFLOAT16, vectors: int = 2) -> torch.Tensor:
    return torch.empty(1, 1, vectors, 16, dim, dtype=dtype)


def test_an_h200_gets_the_costs_measured_on_it() -> None:
    h200 = replace(CARDS[90], memory_bytes_per_us=4.917e6)
    found, measured = estimate_cost(pool_of(128), 4, h200), CostModel()
    assert found.bytes_per_us == pytest.approx(measured.bytes_per_us, rel=1e-3)
    assert found.flops_per_us == pytest.approx(measured.flops_per_us, rel=2e-3)
    assert found.start_us == pytest.approx(measured.start_us)
    assert (found.workers, found.head_dim, found.element_bytes) == (396, 128, 2)


@pytest.mark.parametrize("card", CARDS)
def test_as_many_programs_as_shared_memory_holds(card: int) -> None:
    """Heads of 128 in 32 bits: three on an H100, one where a multiprocessor has 100 KiB."""
    wide = Operands(128, 4, hops=2)
    taken = count_shared_bytes(fit_tile(TILES[0], wide, CARDS[card]), wide, CARDS[card])
    programs = count_programs(pool_of(128, torch.float32), 4, CARDS[card])
    assert programs * (taken + RESERVED_BYTES) <= CARDS[card].processor_shared_bytes
    assert programs == {80: 2, 86: 1, 89: 1, 90: 3, 100: 3, 120: 1}[card]
    assert count_programs(pool_of(128), 4, CARDS[card]) == (2 if card in (86, 89, 120) else 3)
    assert count_programs(pool_of(64), 4, CARDS[card]) == 3
    assert count_programs(pool_of(576, vectors=1), 16, CARDS[card]) >= 1


def test_smaller_entries_make_parts_dearer() -> None:
    """A part is float32 whatever the cache: in FP8 it costs as much as twice the entries."""
    wide, narrow = (estimate_cost(pool_of(128, dtype), 4, CARDS[90]) for dtype in (BFLOAT16, FP8))
    one_row = np.asarray(4)
    parts = [cost.partial_us(4) / float(cost.token_us(one_row)) for cost in (wide, narrow)]
    assert parts[1] == pytest.approx(2 * parts[0])


def test_a_latent_is_one_vector() -> None:
    cost = estimate_cost(pool_of(576, vectors=1), 16, CARDS[90])
    assert 2 * cost.head_dim * cost.element_bytes == 576 * 2


def test_arithmetic_decides_earlier_where_products_are_slower() -> None:
    """Rows that share an entry until its products take longer than its transfer."""
    rows = np.arange(16, 513, 16)

    def most_rows(card: int) -> int:
        cost = estimate_cost(pool_of(128), 4, CARDS[card])
        return int(rows[cost.token_us(rows) == cost.token_us(rows[:1])].max())

    assert most_rows(86) < most_rows(89) < most_rows(90)
