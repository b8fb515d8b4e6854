"""Block tables of a part of what sequences hold: the first pages of each chunk, and the raw tail.

Drafts of the model itself read a part of each chunk. If one model lies on several devices, each
rank keeps a part of the pages that all ranks count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.types import Int32, Int64


class PartTables:
    """A second set of block tables over the pages that sequences hold. It holds no page itself.

    `tables` is int32 [max_sequences, width], by the layouts of `parts`, and follows the tables of
    the cache manager. `lengths` is int32 [max_sequences, groups]: the entries that the next pass
    reads (`set_positions`).
    """

    def __init__(self, parts: Mapping[Retention, Layout], max_sequences: int) -> None:
        """The layout of each of `parts` has the groups of its retention's, with as many or fewer
        pages. A retention that is not in `parts` has no part.
        """
        layouts = list(parts.values())
        width = max(int(layout.group_offset[-1]) for layout in layouts)
        groups = max(len(layout.groups) for layout in layouts)
        self.tables: Int32 = np.zeros((max_sequences, width), np.int32)
        self.lengths: Int32 = np.zeros((max_sequences, groups), np.int32)
        self._follower: Callable[[int, Int64], None] | None = None
        self._places = {whole: _Places.of(whole.layout, part) for whole, part in parts.items()}

    def enter(
        self, slot: int, retention: Retention, sealed_chunks: int, entries: Int64, pages: Int32
    ) -> None:
        """`pages` are entered at `entries` [n] of row `slot` of the block tables.

        The row's sequence has `retention` and so many sealed chunks.
        """
        places = self._places.get(retention)
        if places is None:
            return
        written, read = places.find(entries, sealed_chunks)
        self.tables[slot, written] = pages[read]
        if self._follower is not None:
            self._follower(slot, written)

    def follow(self, follower: Callable[[int, Int64], None]) -> None:
        """See `CacheManager`."""
        self._follower = follower

    def copy(self, writes: Sequence[TableWrite]) -> None:
        """Enter what a `WriteLog` has taken."""
        for write in writes:
            self.enter(write.slot, write.retention, write.sealed_chunks, write.entries, write.pages)

    def set_positions(
        self, layout: Layout, slots: Int64, positions: Int64, tokens: int | Int64 = 1
    ) -> None:
        """The next pass computes `tokens` of each of `slots` [n], from `positions` [n] on.

        Their entries are read, too.
        """
        groups = len(layout.groups)
        self.lengths[slots, :groups] = layout.lengths(*np.divmod(positions, layout.chunk_tokens))
        self.lengths[slots, :groups] += np.asarray(tokens, np.int32)[..., None]


@dataclass(frozen=True)
class TableWrite:
    """`pages` are entered at `entries` [n] of row `slot` of the whole block tables.

    The row is of a sequence of `retention`, with so many sealed chunks.
    """

    slot: int
    retention: Retention
    sealed_chunks: int
    entries: Int64
    pages: Int32


@dataclass(frozen=True, eq=False)
class _Places:
    """For each place in a row of the whole tables: its `group`, and `within` the group.

    `whole` and `part` are the pages of a sealed chunk by group, `begin` is where each group begins
    in a row of the part's tables.
    """

    group: Int64
    within: Int64
    whole: Int64
    part: Int64
    begin: Int64

    @classmethod
    def of(cls, whole: Layout, part: Layout) -> _Places:
        """Of two layouts with as many groups."""
        places = np.arange(whole.group_offset[-1], dtype=np.int64)
        group = np.searchsorted(whole.group_offset, places, side="right") - 1
        return cls(
            group.astype(np.int64),
            places - whole.group_offset[group],
            whole.sealed_pages.astype(np.int64),
            part.sealed_pages.astype(np.int64),
            part.group_offset,
        )

    def find(self, entries: Int64, sealed_chunks: int) -> tuple[Int64, Int64]:
        """The places of the part's tables that `entries` become, and which of these they are.

        The raw tail, all of which belongs to the part, lies behind the sealed chunks.
        """
        group, within = self.group[entries], self.within[entries]
        chunk = np.minimum(within // self.whole[group], sealed_chunks)
        page = within - chunk * self.whole[group]
        read = np.flatnonzero((chunk == sealed_chunks) | (page < self.part[group]))
        place = self.begin[group] + chunk * self.part[group] + page
        return place[read], read
