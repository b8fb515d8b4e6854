"""What decode costs on a card, from its limits, for planners."""

from __future__ import annotations

from torch import Tensor

from tangram.kernels.triton.card import Card
from tangram.kernels.triton.packed import DecodeOptions
from tangram.kernels.triton.tiling import Operands, count_shared_bytes, fit_tile
from tangram.plan.cost import CostModel
from tangram.plan.schedule import CTAS

# What decode reached of an H200's limits (`tangram.plan.cost`): 4.24 of 4.92 TB/s, 400 of 1,071
# TFLOP/s.
READING, MULTIPLYING = 0.862, 0.374
TASK_US = 0.75  # with three programs on each of 132 multiprocessors
RESERVED_BYTES = 1 << 10  # of shared memory, for each block, by CUDA


def count_programs(pool: Tensor, group: int, card: Card) -> int:
    """How many tasks of one row of `group` query heads a multiprocessor of `card` runs at once.

    It is `CTAS`, or as many as its shared memory holds. `pool` [pages, heads, S, P, D].
    """
    options, latent = DecodeOptions(), pool.shape[2] == 1
    tile = next((tile for tile in options.tiles if tile.queries >= group), options.tiles[-1])
    dim = pool.shape[-1] if latent else 1 << (pool.shape[-1] - 1).bit_length()
    operands = Operands(
        dim, max(2, pool.element_size()), hops=1 if latent else 2, vectors=pool.shape[2]
    )
    if latent:
        tile = tile.for_latents(card, pool.element_size())
    fitted = fit_tile(tile, operands, card)
    taken = count_shared_bytes(fitted, operands, card) + RESERVED_BYTES
    return max(1, min(CTAS, card.processor_shared_bytes // taken))


def estimate_cost(pool: Tensor, group: int, card: Card) -> CostModel:
    """The cost model of `card` for entries as `pool` holds them, [pages, heads, S, P, D]."""
    return CostModel(
        bytes_per_us=READING * card.memory_bytes_per_us,
        partial_bytes_per_us=READING * card.memory_bytes_per_us,
        flops_per_us=MULTIPLYING * card.flops_per_us,
        task_us=TASK_US,
        workers=card.processors * count_programs(pool, group, card),
        head_dim=pool.shape[-1],
        element_bytes=pool.element_size() * pool.shape[2] / 2,  # an entry is S vectors
    )
