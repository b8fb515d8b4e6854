"""Where every head's KV entries lie: head groups, columns and slot arithmetic. Integers only.

A *head group* is up to `Hp` (layer, head) pairs that share one page table. A page of the one pool
holds `Hp` *columns*. Each column is a contiguous single-head block of `P` keys and `P` values, or
of `P` latents, which are both. A sequence's table for group g reads

    [ chunk 0: sealed_pages[g] ] [ chunk 1: sealed_pages[g] ] … [ raw tail: up to C / P pages ]

so a head's length after s sealed chunks and r raw tokens is  s · sealed_pages[g] · P + r  (Tangram,
ragged paging). Groups of sliding-window layers come last. They keep every entry of a chunk and only
the newest `window_chunks` chunks; an entry's index in their tables equals its position. Where
windows do not slide (`Geometry.chunked`), tables and lengths count from where the window begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import gcd

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Geometry, Int32, Int64

Head = tuple[int, int]  # (layer, KV head)


@dataclass(frozen=True)
class Layout:
    """The layout of one (profile, page size). Build it with `Layout.build`.

    `groups[g]` lists the member heads by column. `sealed_pages[g]` is what each keeps of a sealed
    chunk, in pages. The first `full_groups` groups see the whole context; the others hold their
    newest `window_chunks` sealed chunks.
    """

    geometry: Geometry
    chunk_tokens: int
    page_tokens: int
    heads_per_page: int
    max_tokens: int
    groups: tuple[tuple[Head, ...], ...]
    sealed_pages: Int32
    full_groups: int
    window_chunks: int

    def __post_init__(self) -> None:
        heads = [
            (layer, head)
            for layer in range(self.geometry.layers)
            for head in range(self.geometry.heads_of(layer).kv_heads)
        ]
        held = sorted(chain.from_iterable(self.groups))
        if held != heads:
            raise ConfigError(
                f"groups hold {len(held)} heads, the model has {len(heads)}: each is in one group"
            )

    @classmethod
    def build(
        cls,
        geometry: Geometry,
        *,
        chunk_tokens: int,
        page_tokens: int,
        heads_per_page: int,
        max_tokens: int,
        groups: Sequence[Sequence[Head]],
        sealed_pages: Sequence[int],
    ) -> Layout:
        """A layout from the groups of the full-attention layers and their page counts.

        Window layers are added and keep all entries of a chunk. Raises `ConfigError` unless the
        groups cover each full-attention head exactly once and counts are in range.
        """
        chunk_pages = chunk_tokens // page_tokens
        if any(not 1 <= len(group) <= heads_per_page for group in groups):
            raise ConfigError(f"every group must have 1 to {heads_per_page} heads (heads_per_page)")
        if any(not 1 <= pages <= chunk_pages for pages in sealed_pages) or len(sealed_pages) != len(
            groups
        ):
            raise ConfigError(
                f"sealed_pages must give 1 to {chunk_pages} pages for each of {len(groups)} groups"
            )
        # All of them keep the newest `window_chunks` chunks, so heads of any two can share a page.
        windows = {at: window for at, window in enumerate(geometry.windows) if window is not None}
        window_groups = list[tuple[Head, ...]]()
        if windows:
            heads = geometry.heads_of(min(windows))
            columns = count_columns(geometry, heads_per_page, heads.head_dim)
            window_groups = adjacent_groups(list(windows), heads.kv_heads, columns)
        behind = 1 if geometry.chunked else chunk_tokens  # a window may begin within a chunk
        window_chunks = max(
            (max(1, (window + behind - 2) // chunk_tokens) for window in windows.values()),
            default=0,
        )
        for window in windows.values() if geometry.chunked else ():
            if window % chunk_tokens:
                raise ConfigError(
                    f"chunk_tokens is {chunk_tokens}, but the model attends within chunks of "
                    f"{window} tokens: choose a divisor of {window}"
                )
        counts = [*sealed_pages, *[chunk_pages] * len(window_groups)]
        return cls(
            geometry,
            chunk_tokens,
            page_tokens,
            heads_per_page,
            max_tokens,
            (*map(tuple, groups), *window_groups),
            np.asarray(counts, np.int32),
            len(groups),
            window_chunks,
        )

    @classmethod
    def lay_out_uncompressed(
        cls,
        geometry: Geometry,
        *,
        chunk_tokens: int,
        page_tokens: int,
        heads_per_page: int,
        max_tokens: int,
    ) -> Layout:
        """The layout of ρ = 1.0: adjacent heads share pages, and every chunk keeps all tokens."""
        groups = adjacent_groups(geometry.full_layers, geometry.kv_heads, heads_per_page)
        return cls.build(
            geometry,
            chunk_tokens=chunk_tokens,
            page_tokens=page_tokens,
            heads_per_page=heads_per_page,
            max_tokens=max_tokens,
            groups=groups,
            sealed_pages=[chunk_tokens // page_tokens] * len(groups),
        )

    def with_groups(
        self,
        groups: Sequence[Sequence[Head]],
        sealed_pages: Sequence[int],
        heads_per_page: int | None = None,
    ) -> Layout:
        """The same with other groups of full-attention heads, and other heads of a page if given.

        Raises `ConfigError` as `build` does.
        """
        return Layout.build(
            self.geometry,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            heads_per_page=self.heads_per_page if heads_per_page is None else heads_per_page,
            max_tokens=self.max_tokens,
            groups=groups,
            sealed_pages=sealed_pages,
        )

    @cached_property
    def chunk_pages(self) -> int:
        """Pages one group needs for a whole raw chunk, C / P."""
        return self.chunk_tokens // self.page_tokens

    @property
    def keeps_everything(self) -> bool:
        """True when sealing drops nothing (ρ = 1.0)."""
        return bool((self.sealed_pages == self.chunk_pages).all())

    @cached_property
    def head_group(self) -> Int32:
        """[L, H]: the group of each head."""
        return self._per_head([group for group, heads in enumerate(self.groups) for _ in heads])

    @cached_property
    def head_column(self) -> Int32:
        """[L, H]: the column of each head in its group's pages."""
        return self._per_head([column for heads in self.groups for column in range(len(heads))])

    @cached_property
    def head_kept_tokens(self) -> Int32:
        """[L, H]: entries each head keeps of a sealed chunk."""
        return np.asarray(self.sealed_pages[self.head_group] * self.page_tokens, np.int32)

    @cached_property
    def head_address(self) -> Int32:
        """[L, H, 3]: where a sequence in slot 0 has the head's page entries, column and length."""
        places = self.group_offset[self.head_group], self.head_column, self.head_group
        return np.stack(places, axis=-1).astype(np.int32)

    def _per_head(self, values: list[int]) -> Int32:
        """[L, H] of `values`, which are in the order of the groups' heads; 0 beyond a layer's."""
        layers, heads = zip(*chain.from_iterable(self.groups), strict=True)
        by_head = np.zeros((self.geometry.layers, self.geometry.most_kv_heads), np.int32)
        by_head[layers, heads] = values
        return by_head

    @cached_property
    def group_offset(self) -> Int64:
        """[groups + 1]: where each group's entries begin in a row of the block tables.

        The last value is the row's width.
        """
        chunks = -(-self.max_tokens // self.chunk_tokens)
        return np.concatenate(
            [[0], np.cumsum(self.sealed_pages.astype(np.int64) * chunks + self.chunk_pages)]
        )

    @cached_property
    def span_group(self) -> Int32:
        """[pages of a sealed chunk]: the group of each page, in the order of a span's pages."""
        return np.repeat(np.arange(len(self.groups), dtype=np.int32), self.sealed_pages)

    @cached_property
    def _span_rank(self) -> Int64:
        starts = np.cumsum(self.sealed_pages) - self.sealed_pages
        return np.arange(self.span_pages, dtype=np.int64) - starts[self.span_group]

    @cached_property
    def span_pages(self) -> int:
        """Pages of one sealed chunk over all groups."""
        return int(self.sealed_pages.sum())

    def span_entries(self, chunk: int | Int64) -> Int64:
        """[…, span pages]: offsets of a sealed chunk's pages in a row of the block tables.

        They are in span order.
        """
        first, step = self._span_first
        return first + np.asarray(chunk, np.int64)[..., None] * step

    @cached_property
    def _span_first(self) -> tuple[Int64, Int64]:
        """Offsets of the pages of chunk 0, and their distance to those of the next chunk."""
        step = self.sealed_pages[self.span_group].astype(np.int64)
        return self.group_offset[self.span_group] + self._span_rank, step

    def raw_entries(self, sealed_chunks: int | Int64, page: int | Int64) -> Int64:
        """[…, groups]: offsets of a raw tail page of every group in a row of the block tables.

        `sealed_chunks` are one number, or [n, 1] beside `page` [n].
        """
        first = self.group_offset[:-1] + sealed_chunks * self.sealed_pages.astype(np.int64)
        return np.asarray(first + np.asarray(page, np.int64)[..., None], np.int64)

    def lengths(self, sealed_chunks: int | Int64, raw_tokens: int | Int64) -> Int32:
        """[…, groups]: entries that each member head of a group can address.

        A window group counts its dropped entries too, but for those of `passed_pages`. Takes the
        counts of one row, or arrays of them.
        """
        sealed, raw = np.asarray(sealed_chunks)[..., None], np.asarray(raw_tokens)[..., None]
        pages = sealed * self.sealed_pages - self.passed_pages(sealed_chunks)
        return np.asarray(pages * self.page_tokens + raw, np.int32)

    def passed_pages(self, sealed_chunks: int | Int64) -> Int64:
        """[…, groups]: pages of a group before a window that does not slide."""
        passed = np.zeros((*np.shape(sealed_chunks), len(self.groups)), np.int64)
        if self.geometry.chunked and self.window_chunks:
            window = max(filter(None, self.geometry.windows)) // self.chunk_tokens
            begins = np.asarray(sealed_chunks) // window * window
            passed[..., self.full_groups :] = begins[..., None] * self.chunk_pages
        return passed

    @cached_property
    def full_span_pages(self) -> int:
        """Pages of one sealed chunk over the groups that see the whole context.

        A span lists them first.
        """
        return int(self.sealed_pages[: self.full_groups].sum())

    @cached_property
    def window_span_pages(self) -> int:
        """Pages of one sealed chunk over the sliding-window groups."""
        return self.span_pages - self.full_span_pages

    def tokens_in(self, pages: int, length_tokens: int) -> int:
        """Tokens that fit into `pages` pages as sealed chunks of sequences of `length_tokens` each.

        The length is rounded down to whole chunks, but to one at least. A sequence takes the pages
        that admission promises it as a prompt: those of a window are counted for its last
        `window_chunks + 1` chunks only. The rest of the pages holds the first chunks of one more
        sequence, and a share of its next chunk. Without windows the length makes no difference.
        """
        chunks = max(1, length_tokens // self.chunk_tokens)
        sequences, rest = divmod(pages, self._prompt_pages(chunks))
        begun = bisect_right(range(chunks), rest, key=self._prompt_pages) - 1
        taken, next_taken = self._prompt_pages(begun), self._prompt_pages(begun + 1)
        part_tokens = (rest - taken) * self.chunk_tokens // (next_taken - taken)
        return (sequences * chunks + begun) * self.chunk_tokens + part_tokens

    def _prompt_pages(self, chunks: int) -> int:
        """Pages that a prompt of so many whole chunks is promised."""
        tokens = chunks * self.chunk_tokens
        return self.count_promised_pages(tokens, tokens)

    def count_held_pages(self, sealed_chunks: int, raw_tokens: int) -> int:
        """Pages held with `sealed_chunks` sealed chunks and `raw_tokens` raw tokens.

        This is the footprint formula.
        """
        raw = -(-raw_tokens // self.page_tokens) * len(self.groups)
        if self.window_chunks:
            raw += min(sealed_chunks, self.window_chunks) * self.window_span_pages
        return sealed_chunks * self.full_span_pages + raw

    def count_held_entries(self, sealed_chunks: int, raw_tokens: int) -> int:
        """KV entries in the pages of `count_held_pages`, over all heads.

        The other slots of these pages are unused columns and the unused ends of raw pages. Entries
        of another head dim count as those of `head_dim` that take as much memory.
        """
        windowed = min(sealed_chunks, self.window_chunks)
        full, window, full_heads, window_heads = self._chunk_entries
        whole = sealed_chunks * full + raw_tokens * full_heads
        return whole + self._convert(windowed * window + raw_tokens * window_heads)

    def _convert(self, entries: int) -> int:
        """Entries of window layers as those of `head_dim` that take as much memory."""
        other = self.geometry.window_heads
        return entries if other is None else entries * other.head_dim // self.geometry.head_dim

    @cached_property
    def _chunk_entries(self) -> tuple[int, int, int, int]:
        """Entries of a sealed chunk in full and in window groups; the numbers of their heads."""
        members = np.asarray([len(group) for group in self.groups], np.int64)
        kept, full = members * self.sealed_pages * self.page_tokens, self.full_groups
        parts = kept[:full], kept[full:], members[:full], members[full:]
        entries, window_entries, heads, window_heads = (int(part.sum()) for part in parts)
        return entries, window_entries, heads, window_heads

    @property
    def page_slots(self) -> int:
        """Entries of `head_dim` that fit into one page, Hp · P."""
        return self.heads_per_page * self.page_tokens

    def peak_pages(self, tokens: int) -> int:
        """The most pages a sequence ever holds on its way to `tokens` tokens."""
        full, rest = divmod(tokens, self.chunk_tokens)
        before_last_seal = self.count_held_pages(full - 1, self.chunk_tokens) if full else 0
        return max(before_last_seal, self.count_held_pages(full, rest))

    def count_promised_pages(self, tokens: int, limit: int) -> int:
        """Pages that a sequence of `tokens` tokens may need until its current chunk ends.

        The chunk ends earlier if the sequence reaches `limit` tokens.
        """
        sealed = tokens // self.chunk_tokens
        growing = self.count_held_pages(
            sealed, min(self.chunk_tokens, limit - sealed * self.chunk_tokens)
        )
        # While a chunk is sealed its queries still read the oldest window part, which is dropped
        # after the step.
        overdue = self.window_span_pages if sealed > self.window_chunks else 0
        return max(growing, self.count_held_pages(sealed, 0) + overdue)

    def most_pages(self, tokens: int) -> int:
        """The most pages that a sequence is ever promised on its way to `tokens` tokens."""
        return max(self.peak_pages(tokens), self.count_promised_pages(tokens, tokens))

    def count_uncompressed_entries(self, tokens: int) -> int:
        """KV entries over all heads for `tokens` tokens if only what left a window is dropped.

        See `count_held_entries`.
        """
        full_heads, windows = self._heads_by_window
        if not windows:
            return tokens * full_heads
        seen = sum([min(tokens, window) * heads for window, heads in windows])
        return tokens * full_heads + self._convert(seen)

    @cached_property
    def _heads_by_window(self) -> tuple[int, list[tuple[int, int]]]:
        """How many heads see the whole context; each window, and how many heads have it."""
        full, windows = 0, Counter[int]()
        for layer, window in enumerate(self.geometry.windows):
            heads = self.geometry.heads_of(layer).kv_heads
            if window is None:
                full += heads
            else:
                windows[window] += heads
        return full, list(windows.items())

    def page_bytes(self, element_bytes: int) -> int:
        """Bytes of one page: the entries of Hp heads × P tokens."""
        return self.page_slots * self.geometry.entry_elements * element_bytes


def count_columns(geometry: Geometry, heads_per_page: int, head_dim: int) -> int:
    """Columns of a page for heads of `head_dim`, if it has `heads_per_page` of the geometry's own.

    Raises `ConfigError` if they do not fill it.
    """
    columns, rest = divmod(heads_per_page * geometry.head_dim, head_dim)
    if rest:
        raise ConfigError(
            f"heads_per_page is {heads_per_page}, but some layers have heads of {head_dim} "
            f"elements, others of {geometry.head_dim}: choose a multiple of "
            f"{head_dim // gcd(head_dim, geometry.head_dim)}"
        )
    return columns


def adjacent_groups(
    layers: Sequence[int], kv_heads: int, heads_per_page: int
) -> list[tuple[Head, ...]]:
    """Cut the heads of `layers`, in their natural order, into runs of `heads_per_page`.

    The last run may be short.
    """
    heads = [(layer, head) for layer in layers for head in range(kv_heads)]
    return [
        tuple(heads[start : start + heads_per_page])
        for start in range(0, len(heads), heads_per_page)
    ]
