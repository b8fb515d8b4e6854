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


def deal_heads(pages: Int64, ranks: int) -> Int64:
    """[L, H]: the heads of each layer in the order of the ranks; the first H / N are rank 0's.

    `pages` [L, H] are what each head keeps of a sealed chunk. No other deal takes fewer page
    numbers. Raises `ConfigError` if N does not divide H.

    All heads in the order of their pages are cut into bundles of N, and each layer into runs of N
    heads. A rank gets one head of each bundle and of each run. Bundles and runs are the nodes of a
    bipartite graph, heads its edges, N at every node. Such a graph has a perfect matching, and
    without this one the next (König, 1916): one for each rank. So the lists of the ranks differ
    only within bundles.

    Example: one layer, pages 4, 4, 1, 1, two ranks: each gets a head of 4 and one of 1. A sealed
    chunk takes 5 page numbers. With consecutive heads rank 0 keeps 8 pages, and it takes 8.
    """
    layers, kv_heads = pages.shape
    check_ranks(kv_heads, ranks)
    share = kv_heads // ranks
    bundle = np.empty(pages.size, np.int64)
    bundle[np.argsort(-pages, axis=None, kind="stable")] = np.arange(pages.size) // ranks
    run = np.arange(pages.size) // ranks
    left, dealt = np.ones(pages.size, np.bool_), np.empty((ranks, layers, share), np.int64)
    for share_of in dealt:
        heads = _match(run, bundle, np.flatnonzero(left))
        left[heads] = False
        share_of[:] = (heads % kv_heads).reshape(layers, share)
    return np.ascontiguousarray(dealt.transpose(1, 0, 2)).reshape(layers, kv_heads)


def _match(run: Int64, bundle: Int64, heads: Int64) -> Int64:
    """[runs]: of `heads` one of each run, which are one of each bundle, too."""
    from scipy.sparse import coo_array  # 0.3 s that every start would pay
    from scipy.sparse.csgraph import maximum_bipartite_matching

    edges = run[heads], bundle[heads]
    graph = coo_array((np.ones(len(heads)), edges)).tocsr()
    matched = maximum_bipartite_matching(graph, perm_type="column")
    fitting = heads[matched[edges[0]] == edges[1]]
    first = np.unique(run[fitting], return_index=True)[1]
    return np.asarray(fitting[first], np.int64)
