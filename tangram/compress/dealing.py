"""Which rank has which KV heads, if one model lies on several devices.

Each of N ranks computes H / N KV heads of every layer. A page holds entries of one head, and a page
number stands for one page on each rank. Every rank lists its heads from the deepest on; the heads
at one place of these lists share page numbers. A sealed chunk takes as many as the deepest head of
each place keeps, so the fullest rank decides what fits. `deal_heads` deals the heads so that ranks
are alike. How many entries a head keeps is the profile's, whatever N is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.compress.groups import Head
from tangram.errors import ConfigError
from tangram.types import Int64

SWAPS = 30_000  # that `deal_heads` tries


def check_ranks(kv_heads: int, ranks: int) -> None:
    """Raise `ConfigError` unless `kv_heads` can be dealt to `ranks`."""
    if kv_heads % ranks:
        fitting = [str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ConfigError(
            f"tensor_parallel_size is {ranks}, but the model has {kv_heads} KV heads in a layer, "
            f"and each rank takes as many of them: choose {' or '.join(fitting)}"
        )


def consecutive_heads(layers: int, kv_heads: int) -> Int64:
    """[L, H]: the heads in the model's own order."""
    return np.tile(np.arange(kv_heads), (layers, 1))


def heads_of_rank(order: Int64, rank: int, ranks: int) -> Int64:
    """[L, H / N]: the heads of `rank` under `order` [L, H]."""
    share = order.shape[1] // ranks
    return order[:, rank * share : (rank + 1) * share]


def rank_heads(
    pages: Int64, order: Int64, layers: Sequence[int], ranks: int
) -> list[list[tuple[Head, int]]]:
    """By rank: (layer, its own number of the head) and the pages that it keeps, deepest first.

    `pages` and `order` are [L, H] over the compressed `layers`.
    """
    listed = []
    for rank in range(ranks):
        kept = np.take_along_axis(pages, heads_of_rank(order, rank, ranks), axis=1)
        places = np.argsort(-kept, axis=None, kind="stable")
        rows, heads = np.unravel_index(places, kept.shape)
        listed.append(
            [
                ((layers[row], int(head)), int(kept[row, head]))
                for row, head in zip(rows, heads, strict=True)
            ]
        )
    return listed


def count_numbers(pages: Int64, order: Int64, ranks: int) -> int:
    """The page numbers that a sealed chunk takes under `order`."""
    return _Cost(pages, ranks).of(order)


def deal_heads(pages: Int64, ranks: int) -> Int64:
    """[L, H]: the heads of each layer in the order of the ranks; the first H / N are rank 0's.

    `pages` [L, H] are what each head keeps of a sealed chunk. Begins with a simple deal and swaps
    two heads of a layer wherever that needs no more page numbers. The same input gives the same
    order. Raises `ConfigError` if N does not divide H.

    Example: one layer, pages 4, 4, 1, 1, two ranks: each gets a head of 4 and one of 1. A sealed
    chunk takes 5 page numbers. With consecutive heads rank 0 would keep 8 pages, and it would take
    8.
    """
    check_ranks(pages.shape[1], ranks)
    cost = _Cost(pages, ranks)
    order = min(consecutive_heads(*pages.shape), _deal_in_turns(pages, ranks), key=cost.of)
    return _improve(order, cost)


def _deal_in_turns(pages: Int64, ranks: int) -> Int64:
    """Deal the heads of each layer from the deepest on, to each rank in turn and back."""
    turns = np.argsort(-pages, axis=1, kind="stable").reshape(len(pages), -1, ranks)
    turns[:, 1::2] = turns[:, 1::2, ::-1]
    return np.ascontiguousarray(turns.transpose(0, 2, 1)).reshape(pages.shape)


class _Cost:
    """The page numbers of a sealed chunk: over all depths, the most heads of a rank as deep."""

    def __init__(self, pages: Int64, ranks: int) -> None:
        self.ranks = ranks
        depths, level = np.unique(-pages, return_inverse=True)
        self.level = level.reshape(pages.shape)  # of each head; 0 is the deepest
        self._widths = -np.diff(np.append(-depths, 0))

    def count(self, order: Int64) -> Int64:
        """[N, levels]: how many heads of each level a rank has."""
        own = np.take_along_axis(self.level, order, axis=1)
        levels = len(self._widths)
        return np.stack(
            [
                np.bincount(heads_of_rank(own, rank, self.ranks).ravel(), minlength=levels)
                for rank in range(self.ranks)
            ]
        )

    def of_counts(self, heads: Int64) -> int:
        """The cost of `heads` [N, levels]."""
        return int(np.cumsum(heads, axis=1).max(axis=0) @ self._widths)

    def of(self, order: Int64) -> int:
        """The cost of `order`."""
        return self.of_counts(self.count(order))


def _improve(order: Int64, cost: _Cost) -> Int64:
    """Swap heads of a layer between two ranks while that costs no more."""
    random = np.random.default_rng(0)
    order, heads = order.copy(), cost.count(order)
    layers, width = order.shape
    share, best = width // cost.ranks, cost.of_counts(heads)
    tried = zip(
        random.integers(layers, size=SWAPS).tolist(),
        random.integers(width, size=(SWAPS, 2)).tolist(),
        strict=True,
    )
    for layer, (one, other) in tried:
        ranks = np.array([one // share, other // share])
        levels = cost.level[layer, order[layer, [one, other]]]
        if ranks[0] == ranks[1] or levels[0] == levels[1]:
            continue
        heads[ranks, levels] -= 1
        heads[ranks[::-1], levels] += 1
        found = cost.of_counts(heads)
        if found <= best:
            best = found
            order[layer, [one, other]] = order[layer, [other, one]]
        else:
            heads[ranks, levels] += 1
            heads[ranks[::-1], levels] -= 1
    return order
