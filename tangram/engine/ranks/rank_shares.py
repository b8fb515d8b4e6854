"""What each rank keeps, if one model lies on several devices: its heads, and their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.compress.dealing import (
    check_ranks,
    consecutive_heads,
    deal_heads,
    heads_of_rank,
    rank_heads,
)
from tangram.compress.groups import Head
from tangram.types import Geometry, HeadScales, Int64


@dataclass(frozen=True, eq=False)
class RankShares:
    """The share of one rank in `heads` [L, H / N], numbers of the model's KV heads.

    `order` [L, H] lists the heads of all ranks. Sequences carry the retentions `common`, whose
    layouts count page numbers of all ranks. `local` has for each of them where entries of this rank
    lie.
    """

    order: Int64
    heads: Int64
    common: Sequence[Retention]
    local: Mapping[Retention, Retention]


def share_retentions(
    whole: Sequence[Retention], geometry: Geometry, rank: int, ranks: int
) -> RankShares:
    """The share of `rank` in the retentions `whole` of a model of `geometry`.

    The first of them that drops or orders entries decides who has which heads. Raises `ConfigError`
    if N does not divide the KV heads.
    """
    check_ranks(geometry.kv_heads, ranks)
    full, order = list(geometry.full_layers), consecutive_heads(geometry.layers, geometry.kv_heads)
    for retention in whole:
        if retention.orders:
            read = retention if retention.draft is None else retention.draft
            order[full] = deal_heads(_kept_pages(read.layout), ranks)
            break
    heads = heads_of_rank(order, rank, ranks)
    local = replace(
        geometry, kv_heads=geometry.kv_heads // ranks, query_heads=geometry.query_heads // ranks
    )
    local_of = dict[Retention, Retention]()
    for retention in whole:
        listed = rank_heads(_kept_pages(retention.layout), order[full], full, ranks)
        numbers = [max(pages for _, pages in place) for place in zip(*listed, strict=True)]
        members = [head for head, _ in listed[rank]]
        draft = _share_draft(retention.draft, local, heads, members)
        layout = _lay_out(retention.layout, local, members, numbers)
        common = replace(retention, layout=layout, draft=draft)
        kept = [pages for _, pages in listed[rank]]
        local_of[common] = replace(
            retention,
            layout=_lay_out(retention.layout, local, members, kept),
            scales=_scales_of(retention.scales, heads),
            draft=draft,
        )
    return RankShares(order, heads, list(local_of), local_of)


def _share_draft(
    draft: Retention | None, local: Geometry, heads: Int64, members: Sequence[Head]
) -> Retention | None:
    """What a rank reads when it drafts: of each of its heads the first pages of a chunk."""
    if draft is None:
        return None
    pages = draft.layout.sealed_pages[draft.layout.head_group]
    kept = [int(pages[layer, heads[layer, head]]) for layer, head in members]
    layout = _lay_out(draft.layout, local, members, kept)
    return replace(draft, layout=layout, scales=_scales_of(draft.scales, heads))


def _kept_pages(layout: Layout) -> Int64:
    """[L, H]: the pages that each head of a full-attention layer keeps of a sealed chunk."""
    kept = layout.sealed_pages[layout.head_group].astype(np.int64)
    return np.asarray(kept[list(layout.geometry.full_layers)], np.int64)


def _lay_out(
    whole: Layout, geometry: Geometry, heads: Sequence[Head], pages: Sequence[int]
) -> Layout:
    """`whole` for the heads of one rank, each in pages of its own."""
    return Layout.build(
        geometry,
        chunk_tokens=whole.chunk_tokens,
        page_tokens=whole.page_tokens,
        heads_per_page=1,
        max_tokens=whole.max_tokens,
        groups=[(head,) for head in heads],
        sealed_pages=pages,
    )


def _scales_of(scales: HeadScales | None, heads: Int64) -> HeadScales | None:
    if scales is None:
        return None
    return tuple(
        tuple(row[head] for head in mine) for row, mine in zip(scales, heads.tolist(), strict=True)
    )
