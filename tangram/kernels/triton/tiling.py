"""The tile that one program computes at a time, as the card's shared memory allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from tangram.errors import ConfigError
from tangram.kernels.triton.card import HOPPER, Card

LEAST_ENTRIES = 16  # of a tile: the least that matrix instructions take
_BESIDE = 1 << 10  # barriers, and sums between warps


@dataclass(frozen=True)
class Tile:
    """How up to `queries` query rows run: the tile of entries, warps and pipeline stages.

    `turned`, for latents: queries are the columns of its products (`decode._take_latents`).
    """

    queries: int
    entries: int = 64
    warps: int = 4
    stages: int = 2
    turned: bool = False

    def for_latents(self, card: Card, entry_bytes: int) -> Tile:
        """The same for a pool of latents: sums of 512 elements a query fill the registers.

        More queries than it has are those of several programs. Entries of 16 bits on an H200: the
        fastest measured (`bench.kernels.latents`).
        """
        if card.capability == HOPPER and entry_bytes == 2:
            if self.queries > 32:
                return Tile(64, 64, warps=8)
            few = self.queries <= 16
            return Tile(self.queries, 32 if few else 64, stages=3 if few else 2, turned=True)
        queries = min(self.queries, 32)
        return Tile(queries, 32, warps=4 if queries <= 16 else 8, stages=3)


@dataclass(frozen=True)
class Operands:
    """The operands of a program: `head_dim` rounded up as loaded, `element_bytes` of queries.

    `hops` are the dependent loads before a product: 2 where the loop looks up the place of entries.
    `vectors` of an entry: a key and a value, or a latent. `widens`: entries are stored in FP8 and
    scaled before they are multiplied.
    """

    head_dim: int
    element_bytes: int
    hops: int
    widens: bool = False
    vectors: int = 2


def count_shared_bytes(tile: Tile, operands: Operands, card: Card) -> int:
    """The shared memory that Triton takes for a program, or a little more.

    See `tests/gpu/test_cards.py`. It holds queries, weights, and the keys and values of each
    pipeline stage that runs ahead.
    """
    size, dim = operands.element_bytes, operands.head_dim
    scored = tile.entries if tile.turned else tile.queries  # rows of scores
    ahead = max(1, tile.stages - operands.hops) + (card.multiplies_shared and scored >= 64)
    if size == 4:
        ahead = 1  # multiplied without tensor cores, and not pipelined
    rows = operands.vectors * ahead * tile.entries + tile.queries
    taken = rows * dim * size + tile.queries * tile.entries * size + _BESIDE
    if operands.widens:
        taken += 2 * tile.entries * dim * (ahead + size)
    return taken


@cache
def fit_tile(tile: Tile, operands: Operands, card: Card, least: int = LEAST_ENTRIES) -> Tile:
    """`tile`, or the nearest that fits: fewer stages, then half the entries, down to `least`.

    Raises `ConfigError` if nothing fits.
    """
    for smaller in _smaller(tile, least):
        if count_shared_bytes(smaller, operands, card) <= card.shared_bytes:
            return smaller
    raise ConfigError(
        f"heads of {operands.head_dim} dimensions in {8 * operands.element_bytes} bits do not fit "
        f"into the {card.shared_bytes >> 10} KiB of shared memory that a block of this GPU has: "
        "use --dtype bfloat16"
    )


def _smaller(tile: Tile, least: int) -> Iterator[Tile]:
    entries = tile.entries
    while entries >= min(least, tile.entries):
        for stages in range(tile.stages, min(1, tile.stages - 1), -1):
            yield replace(tile, entries=entries, stages=stages)
        entries //= 2
