"""How one block of vLLM holds KV entries: a sealed chunk, or raw tokens of one.

A block is a *slab*: the bytes of one block over all layers, as `pages` pages of Tangram's pool. It
holds one sealed chunk, or raw rows: a row is P tokens of all heads, a page in each group, and the
pages of its *notes*, which the scorer reads when the chunk ends. A row may end in the next block. A
sequence has `columns` blocks a chunk in vLLM's block table: `raw_blocks` raw ones, then the sealed
one. Where all entries stay a chunk is sealed as it lies, and has one.

    block, sealed   page 0 of every group, page 1 of every group that has one, …
    blocks, raw     row 0: a page of every group, its notes, row 1: …

Worked example: groups that keep 3, 1 and 2 of 4 pages. A slab has 6 pages, so 2 raw rows without
notes, and a chunk 2 raw blocks. In a sealed block group 0 has the pages 0, 3 and 5, group 1 page 1,
group 2 pages 2 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tangram.cache.layout import Layout
from tangram.compress.profile import Profile
from tangram.types import Geometry, Int64

PAGE_TOKENS, CHUNK_TOKENS = 16, 512  # where no profile says it
# A slab may grow by this part: a raw block less is worth more.
MOST_PADDING = 1 / 32


def full_geometry(layers: int, kv_heads: int, query_heads: int, head_dim: int) -> Geometry:
    """The shape of a model whose layers all see the whole context.

    Of vocabulary and positions nothing is known here.
    """
    return Geometry(layers, kv_heads, query_heads, head_dim, 1, 1, (None,) * layers)


class NoteForm(NamedTuple):
    """What a scorer reads of raw tokens besides their entries, from place `first` of a chunk on.

    A token has so many `elements` of the pool in each layer.
    """

    first: int
    elements: int


@dataclass(frozen=True, eq=False)
class Slab:
    """The form of a block for `layout`, whose `max_tokens` bound a sequence.

    None are `notes` of a scorer that reads entries alone.
    """

    layout: Layout
    notes: NoteForm | None = None

    @classmethod
    def lay_out(
        cls,
        geometry: Geometry,
        profile: Profile | None,
        chunk_tokens: int,
        max_tokens: int,
        notes: NoteForm | None,
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
        layout = Layout.build(
            geometry,
            chunk_tokens=chunk_tokens,
            page_tokens=profile.page_tokens,
            heads_per_page=profile.heads_per_page,
            max_tokens=max_tokens,
            groups=profile.groups,
            sealed_pages=profile.sealed_pages,
        )
        return cls(layout, None if layout.keeps_everything else notes)

    @cached_property
    def pages(self) -> int:
        """Pages of a block: those of a sealed chunk, and more where that saves a raw block."""
        span, raw = self.layout.span_pages, int(self._row_ends[-1])
        fewest_blocks = -(-raw // int(span * (1 + MOST_PADDING)))
        return max(span, -(-raw // fewest_blocks))

    @cached_property
    def _row_ends(self) -> Int64:
        """[chunk rows + 1]: raw pages of the first 0, 1, … rows of a chunk."""
        layout = self.layout
        pages = np.full(layout.chunk_pages, len(layout.groups), np.int64)
        if self.notes is not None:
            elements = layout.geometry.layers * layout.page_tokens * self.notes.elements
            pages[self.notes.first // layout.page_tokens :] += -(-elements // self._page_elements)
        return np.concatenate([[0], np.cumsum(pages)])

    @property
    def _page_elements(self) -> int:
        return self.layout.page_bytes(1)

    @cached_property
    def raw_ends(self) -> tuple[int, ...]:
        """Tokens of a chunk that its first 0, 1, … raw blocks hold."""
        blocks = -(-int(self._row_ends[-1]) // self.pages)
        ends = np.arange(blocks + 1) * self.pages
        rows = np.searchsorted(self._row_ends, ends, side="right") - 1
        return tuple((rows * self.layout.page_tokens).tolist())

    @property
    def raw_blocks(self) -> int:
        """Blocks that hold a whole raw chunk."""
        return len(self.raw_ends) - 1

    @cached_property
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

    @cached_property
    def raw_numbers(self) -> Int64:
        """[chunk rows, groups]: the numbers of a chunk's raw rows among its raw pages.

        Raw page n lies in raw block n // `pages`, where it is page n % `pages`.
        """
        return self._row_ends[:-1, None] + np.arange(len(self.layout.groups))

    @cached_property
    def note_vector(self) -> int:
        """Elements that notes are written by: a page and the notes of a token have whole ones."""
        return 1 if self.notes is None else math.gcd(self.notes.elements, self._page_elements)

    def note_numbers(self, places: Int64) -> tuple[Int64, Int64]:
        """[L, n, vectors], twice: where the tokens at `places` [n] of a chunk have notes.

        First the numbers of raw pages (`raw_numbers`), then those of vectors of `note_vector`
        elements in these pages.
        """
        layout = self.layout
        a_token = 0 if self.notes is None else self.notes.elements // self.note_vector
        rows, inside = np.divmod(places, layout.page_tokens)
        layers = np.arange(layout.geometry.layers)[:, None]
        tokens = (layers * layout.page_tokens + inside)[..., None]
        pages, vectors = np.divmod(tokens * a_token + np.arange(a_token), self.page_vectors)
        return self._row_ends[rows][:, None] + len(layout.groups) + pages, vectors

    @property
    def page_vectors(self) -> int:
        """Vectors of `note_vector` elements in a page."""
        return self._page_elements // self.note_vector
