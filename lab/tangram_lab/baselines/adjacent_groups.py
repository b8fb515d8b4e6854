"""Neighbours share pages, whatever their budgets are."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.compress.groups import Head


def group_adjacent(
    groups: Sequence[Sequence[Head]], sealed_pages: Sequence[int], heads_per_page: int
) -> tuple[list[tuple[Head, ...]], list[int]]:
    """The heads of `groups` in their natural order, cut into runs of `heads_per_page`.

    Each run is as deep as its deepest head: no head keeps fewer pages than `sealed_pages` gave its
    old group. Together the runs occupy what that grouping costs. With H heads a page a run is a
    layer. Returns the groups and their pages, as `cluster` and `allot_pages` do.
    """
    kept = {
        head: pages for group, pages in zip(groups, sealed_pages, strict=True) for head in group
    }
    heads = sorted(kept)
    runs = [tuple(heads[at : at + heads_per_page]) for at in range(0, len(heads), heads_per_page)]
    return runs, [max(kept[head] for head in run) for run in runs]
