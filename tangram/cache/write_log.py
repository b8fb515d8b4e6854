"""What is entered in the block tables, for those who keep a part of them elsewhere."""

from __future__ import annotations

from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import TableWrite
from tangram.types import Int64


class WriteLog:
    """What is entered in the block tables of `cache`."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache, self._writes = cache, list[TableWrite]()
        cache.follow(self._note)

    def _note(self, slot: int, entries: Int64) -> None:
        seq, pages = self._cache.sequences[slot], self._cache.tables[slot, entries]
        write = TableWrite(slot, seq.keys.retention, seq.sealed_chunks, entries, pages)
        self._writes.append(write)

    def take(self) -> tuple[TableWrite, ...]:
        """The writes since the last call, in their order."""
        writes, self._writes = tuple(self._writes), []
        return writes
