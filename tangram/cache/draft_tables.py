"""Block tables of what drafts read: the first pages of each sealed chunk, and the raw tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.types import Int32, Int64


class DraftTables:
    """A second set of block tables over the pages that sequences hold. It holds no page itself.

    `tables` is int32 [max_sequences, width], by the layouts of `Retention.draft`, and follows the
    tables of the cache manager. `lengths` is int32 [max_sequences, groups]: the entries that the
    next draft pass reads (`set_positions`). `follower` is as in `CacheManager`.
    """

    def __init__(self, retentions: Sequence[Retention], max_sequences: int) -> None:
        """Of `retentions` at least one has a draft."""
        drafts = [retention.draft.layout for retention in retentions if retention.draft is not None]
        width = max(int(layout.group_offset[-1]) for layout in drafts)
        self.tables: Int32 = np.zeros((max_sequences, width), np.int32)
        self.lengths: Int32 = np.zeros(
            (max_sequences, max(len(layout.groups) for layout in drafts)), np.int32
        )
        self.follower: Callable[[int, Int64], None] | None = None
        self._places = {
            retention: _Places.of(retention.layout, retention.draft.layout)
            for retention in retentions
            if retention.draft is not None
        }

    def enter(self, seq: SequenceCache, entries: Int64, pages: Int32) -> None:
        """`pages` are entered at `entries` [n] of the row of `seq` in the block tables."""
        places = self._places.get(seq.keys.retention)
        if places is None:
            return
        # Raw pages are all read; they lie behind the sealed chunks.
        read = places.first[entries] | (places.chunk[entries] >= seq.sealed_chunks)
        written = places.place[entries[read]]
        self.tables[seq.slot, written] = pages[read]
        if self.follower is not None:
            self.follower(seq.slot, written)

    def past_lengths(self, slot: int, layout: Layout, position: int) -> Int32:
        """[groups]: the entries that each member head has of the tokens before `position`."""
        return layout.lengths(*divmod(position, layout.chunk_tokens))

    def set_positions(self, layout: Layout, slots: Int64, positions: Int64) -> None:
        """The next pass computes one token of each of `slots` [n], at `positions` [n].

        Their entries are read, too.
        """
        groups = len(layout.groups)
        self.lengths[slots, :groups] = layout.lengths(*np.divmod(positions, layout.chunk_tokens))
        self.lengths[slots, :groups] += 1


@dataclass(frozen=True, eq=False)
class _Places:
    """For each place in a row of the whole tables: its `place` in a row of the draft tables.

    `chunk` is the chunk that it belongs to. Once that is sealed, drafts read the places of `first`.
    """

    place: Int64
    chunk: Int64
    first: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, whole: Layout, draft: Layout) -> _Places:
        """Of two layouts with the same groups; `whole` keeps everything."""
        places = np.arange(whole.group_offset[-1], dtype=np.int64)
        group = np.searchsorted(whole.group_offset, places, side="right") - 1
        chunk, page = np.divmod(places - whole.group_offset[group], whole.chunk_pages)
        kept = draft.sealed_pages.astype(np.int64)[group]
        place = draft.group_offset[group] + chunk * kept + page
        return cls(place.astype(np.int64), chunk.astype(np.int64), page < kept)
