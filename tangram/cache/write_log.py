"""What is entered in the block tables, for those who keep a part of them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import TableWrite
from tangram.cache.retention import Retention
from tangram.types import Int64


class WriteLog:
    """What is entered in the block tables of `cache`, whose sequences have `retentions`."""

    def __init__(self, cache: CacheManager, retentions: Sequence[Retention]) -> None:
        self._cache, self._writes = cache, list[TableWrite]()
        self._numbers = {retention: number for number, retention in enumerate(retentions)}
        cache.follower = self._note

    def _note(self, slot: int, entries: Int64) -> None:
        seq, pages = self._cache.sequences[slot], self._cache.tables[slot, entries]
        number = self._numbers[seq.keys.retention]
        self._writes.append(TableWrite(slot, number, seq.sealed_chunks, entries, pages))

    def take(self) -> tuple[TableWrite, ...]:
        """The writes since the last call, in their order."""
        writes, self._writes = tuple(self._writes), []
        return writes
