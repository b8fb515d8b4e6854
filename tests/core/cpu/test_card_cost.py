"""What planners are told of a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tangram.kernels.triton.card import read_card
from tangram.kernels.triton.card_cost import RESERVED_BYTES, count_programs, estimate_cost
from tangram.kernels.triton.packed import TILES
from tangram.kernels.triton.tiling import Operands, Tile, count_shared_bytes, fit_tile
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
    latent = [
        count_programs(pool_of(576, vectors=1), heads, CARDS[card]) for heads in (16, 32, 128)
    ]
    assert latent == {90: [2, 1, 1], 100: [2, 2, 2]}.get(card, [1, 1, 1])


@pytest.mark.parametrize(("queries", "taken"), [(16, 93184), (32, 188416), (64, 221184)])
def test_latents_take_no_more_of_an_h100_than_is_counted(queries: int, taken: int) -> None:
    """Bytes that Triton 3.6 took: an undercount starts programs that do not fit together."""
    operands = Operands(576, 2, hops=1, vectors=1)
    tile = Tile(queries).for_latents(CARDS[90], 2)
    assert fit_tile(tile, operands, CARDS[90]) == tile
    assert taken <= count_shared_bytes(tile, operands, CARDS[90]) <= 1.05 * taken


@pytest.mark.parametrize(
    ("name", "capability", "processors", "clock_mhz", "bus_bits", "memory_mhz", "tflops", "gb"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, 384, 9751, 71.0, 936),
        ("NVIDIA L40S", (8, 9), 142, 2520, 384, 9001, 362.0, 864),
        ("NVIDIA L4", (8, 9), 58, 2040, 192, 6251, 121.0, 300),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, 512, 14001, 209.5, 1792),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1830, 5120, 2619, 989.4, 3352),
    ],
)
def test_a_card_is_as_fast_as_its_data_sheet_says(
    name: str,
    capability: tuple[int, int],
    processors: int,
    clock_mhz: int,
    bus_bits: int,
    memory_mhz: int,
    tflops: float,
    gb: float,
) -> None:
    """Data sheets count GeForce's products at half the rate of other cards of the generation."""
    found = driver_of(
        name, capability, processors, clock_rate=1000 * clock_mhz, memory_bus_width=bus_bits
    )
    found.memory_clock_rate = 1000 * memory_mhz
    card = read_card(found)
    assert card.flops_per_us == pytest.approx(tflops * 1e6, rel=0.02)
    assert card.memory_bytes_per_us == pytest.approx(gb * 1e3, rel=0.01)


def test_a_driver_that_tells_no_rates_stops_nothing() -> None:
    found = driver_of("GRID", (8, 6), 72, clock_rate=0, memory_bus_width=0)
    assert estimate_cost(pool_of(128), 4, read_card(found)).token_us(np.asarray(4)) > 0


def driver_of(
    name: str, capability: tuple[int, int], processors: int, **rates: int
) -> SimpleNamespace:
    """What torch has of a driver; the memory clock is 0."""
    major, minor = capability
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=processors,
        shared_memory_per_block_optin=99 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        **{"memory_clock_rate": 0, **rates},
    )


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
