"""How one block of vLLM holds KV entries: a sealed chunk, or raw tokens of one.

A block is a *slab*: the bytes of one block over all layers, as `pages` pages of Tangram's pool. It
holds one sealed chunk, or `raw_rows` raw rows: a row is P tokens of all heads, a page in each
group. A sequence has `columns` blocks a chunk in vLLM's block table: `raw_blocks` raw ones, then
the sealed one. Where all entries stay a chunk is sealed as it lies, and has one.

    block, sealed   page 0 of every group, page 1 of every group that has one, …
    block, raw      row 0: a page of every group, row 1: …

Worked example: groups that keep 3, 1 and 2 of 4 pages. A slab has 6 pages, so 2 raw rows, and a
chunk 2 raw blocks. In a sealed block group 0 has the pages 0, 3 and 5, group 1 page 1, group 2
pages 2 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tangram.cache.layout import Layout
from tangram.compress.profile import Profile
from tangram.types import Geometry, Int64

PAGE_TOKENS, CHUNK_TOKENS = 16, 512  # where no profile says it
# A slab may grow by this part to hold another raw row: a raw block less is worth more.
MOST_PADDING = 1 / 32


def full_geometry(layers: int, kv_heads: int, query_heads: int, head_dim: int) -> Geometry:
    """The shape of a model whose layers all see the whole context.

    Of vocabulary and positions nothing is known here.
    """
    return Geometry(layers, kv_heads, query_heads, head_dim, 1, 1, (None,) * layers)


@dataclass(frozen=True, eq=False)
class Slab:
    """The form of a block for `layout`, whose `max_tokens` bound a sequence."""

    layout: Layout

    @classmethod
    def lay_out(
        cls, geometry: Geometry, profile: Profile | None, chunk_tokens: int, max_tokens: int
    ) -> Slab:
        """That of `profile`; without one all entries stay, and a page holds heads of one layer."""
        if profile is None:
            return cls(
                Layout.lay_out_uncompressed(
                    geometry,
                    chunk_tokens=chunk_tokens,
                    page_tokens=PAGE_TOKENS,
                    heads_per_page=geometry.kv_heads,
                    max_tokens=max_tokens,
                )
            )
        return cls(
            Layout.build(
                geometry,
                chunk_tokens=chunk_tokens,
                page_tokens=profile.page_tokens,
                heads_per_page=profile.heads_per_page,
                max_tokens=max_tokens,
                groups=profile.groups,
                sealed_pages=profile.sealed_pages,
            )
        )

    @cached_property
    def pages(self) -> int:
        """Pages of a block: those of a sealed chunk, and more where that saves a raw block."""
        groups, span, rows = len(self.layout.groups), self.layout.span_pages, self._chunk_rows
        most = int(span * (1 + MOST_PADDING)) // groups
        fewest_blocks = -(-rows // most)
        return max(span, -(-rows // fewest_blocks) * groups)

    @property
    def _chunk_rows(self) -> int:
        return self.layout.chunk_pages

    @cached_property
    def raw_rows(self) -> int:
        """Raw rows of a block."""
        return min(self._chunk_rows, self.pages // len(self.layout.groups))

    @property
    def raw_tokens(self) -> int:
        """Raw tokens of a block."""
        return self.raw_rows * self.layout.page_tokens

    @cached_property
    def raw_blocks(self) -> int:
        """Blocks that hold a whole raw chunk."""
        return -(-self._chunk_rows // self.raw_rows)

    @property
    def columns(self) -> int:
        """Columns of a chunk in a row of vLLM's block table."""
        return 1 if self.layout.keeps_everything else self.raw_blocks + 1

    @cached_property
    def kept_entries(self) -> int:
        """Entries of a sealed chunk over all heads."""
        return int(self.layout.head_kept_tokens.sum())

    @property
    def kept_share(self) -> float:
        """The bytes of a block as a share of those of an uncompressed chunk."""
        layout = self.layout
        entries = layout.chunk_tokens * layout.head_kept_tokens.size
        return self.pages * layout.page_slots / entries

    @cached_property
    def sealed_places(self) -> Int64:
        """[pages of a sealed chunk]: where a block has them, in the order of the layout's spans."""
        layout = self.layout
        starts = np.cumsum(layout.sealed_pages) - layout.sealed_pages
        rank = np.arange(layout.span_pages) - starts[layout.span_group]
        places = np.empty(layout.span_pages, np.int64)
        places[np.lexsort((layout.span_group, rank))] = np.arange(layout.span_pages)
        return places

    def raw_pages(self, blocks: Int64) -> Int64:
        """[chunk rows, groups]: the pages of a chunk's raw rows in its raw `blocks`."""
        groups, rows = len(self.layout.groups), np.arange(self._chunk_rows)
        first = blocks[rows // self.raw_rows] * self.pages + rows % self.raw_rows * groups
        return np.asarray(first[:, None] + np.arange(groups), np.int64)
