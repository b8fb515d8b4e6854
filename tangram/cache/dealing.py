"""Which rank has which KV heads, and the layout of a rank's pages. Integers only.

With N ranks (tensor parallelism) a page of `Hp` columns is cut into N pages of `Hp / N` columns, one
on each rank, under the same id. So there is one ledger, and block tables are equal everywhere. For
that each rank must have the same number of heads of every head group. It must have the same number
of heads of every layer, too, since the ranks compute a layer together.

Both are possible at once, whatever the groups are. Layers and groups are the two sides of a
bipartite graph and heads are its edges. Its edges can be coloured with N colours so that the numbers
of any two colours at a node differ by at most one (de Werra, 1971, equitable edge colourings).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.cache.layout import Head, Layout
from tangram.cache.retention import Retention
from tangram.errors import ConfigError
from tangram.types import Int32


def deal_heads(groups: Iterable[Sequence[Head]], kv_heads: int, ranks: int) -> Int32:
    """[L, H]: the rank of each head of `groups`, which hold every head of the model once.

    Each rank gets H / N heads of every layer. Of a group of n heads it gets n / N, rounded down or
    up.

    Example: 2 layers of 2 heads, groups ((0, 0), (0, 1)) and ((1, 0), (1, 1)), 2 ranks: one head
    of each group and layer on each rank, [[0, 1], [0, 1]].

    Raises `ConfigError` if H is no multiple of N.
    """
    check_heads(kv_heads, ranks)
    # Bundles of at most N heads of a group: no two heads of a bundle may lie on one rank. Then a
    # group that is full of bundles has equally many heads on each.
    bundles = [group[at : at + ranks] for group in groups for at in range(0, len(group), ranks)]
    edges = sorted(
        ((layer, head // ranks), number, (layer, head))
        for number, bundle in enumerate(bundles)
        for layer, head in bundle
    )
    colours = _colour([edge[:2] for edge in edges], ranks)
    rank_of = np.zeros((1 + max(head[0] for *_, head in edges), kv_heads), np.int32)
    for (*_, (layer, head)), colour in zip(edges, colours, strict=True):
        rank_of[layer, head] = colour
    return rank_of


def check_heads(kv_heads: int, ranks: int) -> None:
    """Raise `ConfigError` unless `ranks` can have equally many of `kv_heads` KV heads."""
    if kv_heads % ranks:
        fitting = [str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0]
        raise ConfigError(
            f"tensor_parallel_size is {ranks}, but the model has {kv_heads} KV heads in each layer, "
            f"which cannot be dealt evenly: choose one of {', '.join(fitting)}"
        )


def _colour(edges: Sequence[tuple[tuple[int, int], int]], colours: int) -> list[int]:
    """A colour for each edge of a bipartite graph, such that no two at a node are equal.

    A node has at most as many edges as there are `colours`; these always suffice (König, 1916).
    """
    left: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    right: defaultdict[int, dict[int, int]] = defaultdict(dict)
    found = [0] * len(edges)
    for number, (near, far) in enumerate(edges):
        free = _first_free(left[near], colours)
        wanted = _first_free(right[far], colours)
        if free in right[far]:
            # Swap both colours along the path that begins at the far node with `free`. It ends
            # before the near node, which has no edge of that colour.
            path, node, on_right, colour = list[int](), far, True, free
            here: dict[int, int] = right[far]
            while colour in here:
                path.append(here[colour])
                on_right = not on_right
                node_left, node = edges[path[-1]]
                here = right[node] if on_right else left[node_left]
                colour = wanted if colour == free else free
            for edge in path:
                own_left, own_right = edges[edge]
                for table in (left[own_left], right[own_right]):
                    if table.get(found[edge]) == edge:
                        del table[found[edge]]
            for edge in path:
                found[edge] = wanted if found[edge] == free else free
                own_left, own_right = edges[edge]
                left[own_left][found[edge]] = right[own_right][found[edge]] = edge
        found[number] = free
        left[near][free] = right[far][free] = number
    return found


def _first_free(taken: dict[int, int], colours: int) -> int:
    return next(colour for colour in range(colours) if colour not in taken)


@dataclass(frozen=True, eq=False)
class Dealing:
    """The heads of every rank: `rank_of` [L, H], for `ranks` ranks."""

    rank_of: Int32
    ranks: int

    def heads(self, rank: int) -> Int32:
        """[L, H / N]: the heads that `rank` has of each layer, ascending."""
        return np.asarray(np.nonzero(self.rank_of == rank)[1], np.int32).reshape(
            len(self.rank_of), -1
        )

    def regroup(self, layout: Layout) -> Layout:
        """`layout` with groups of which each rank has at most `Hp / N` heads.

        Every head keeps as many pages of a chunk as before. Where groups were what heads are dealt
        by, there are no more of them than before. Other layouts may get more groups, of fewer
        heads each.
        """
        columns = layout.heads_per_page // self.ranks
        classes: defaultdict[tuple[int, int], list[Head]] = defaultdict(list)
        for number, (group, pages) in enumerate(
            zip(layout.groups, layout.sealed_pages.tolist(), strict=True)
        ):
            # Those of one depth in full layers; in window layers those of a layer.
            windowed = number >= layout.full_groups
            kind = (1, group[0][0]) if windowed else (0, -pages)
            classes[kind].extend(group)
        groups, counts, full = list[tuple[Head, ...]](), list[int](), 0
        for kind in sorted(classes):
            own = [
                [head for head in sorted(classes[kind]) if self.rank_of[head] == rank]
                for rank in range(self.ranks)
            ]
            for at in range(0, max(map(len, own)), columns):
                groups.append(tuple(head for part in own for head in part[at : at + columns]))
                counts.append(layout.chunk_pages if kind[0] else -kind[1])
                full += not kind[0]
        return replace(
            layout,
            groups=tuple(groups),
            sealed_pages=np.asarray(counts, np.int32),
            full_groups=full,
        )

    def layout_of(self, layout: Layout, rank: int) -> Layout:
        """What `rank` has of a `layout` that `regroup` has made: the same pages, of fewer columns.

        Heads are numbered within the rank. A group may have none of its heads.
        """
        place = {
            (layer, int(head)): (layer, number)
            for layer, heads in enumerate(self.heads(rank))
            for number, head in enumerate(heads)
        }
        geometry = layout.geometry
        return replace(
            layout,
            geometry=replace(
                geometry,
                kv_heads=geometry.kv_heads // self.ranks,
                query_heads=geometry.query_heads // self.ranks,
            ),
            heads_per_page=layout.heads_per_page // self.ranks,
            groups=tuple(
                tuple(place[head] for head in group if head in place) for group in layout.groups
            ),
        )

    def retention_of(self, retention: Retention, rank: int) -> Retention:
        """What `rank` has of a `retention` whose layout `regroup` has made."""
        heads, scales = self.heads(rank), retention.scales
        return replace(
            retention,
            layout=self.layout_of(retention.layout, rank),
            scales=None
            if scales is None
            else tuple(
                tuple(row[head] for head in own) for row, own in zip(scales, heads, strict=True)
            ),
        )
