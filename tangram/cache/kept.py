"""Which entries of sealed chunks were kept, by the chunks' keys: bits in host memory.

Equal keys mean equal contents, so they mean equal bits. They stay known while a chunk is cached, in
host memory or evicted, as long as their own memory lasts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from tangram.watch import KeptPositions

# A key, and the objects around the bits.
_ENTRY_BYTES = 512


class KeptStore:
    """The kept positions of chunks in at most `limit_bytes`, least recently used ones forgotten.

    Any thread may call it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._entries: OrderedDict[bytes, KeptPositions] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: bytes, kept: KeptPositions) -> None:
        """Note the positions of the chunk `key`, if they fit."""
        size = _size(kept)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return
            if size > self.limit_bytes:
                return
            self._entries[key] = kept
            self.used_bytes += size
            while self.used_bytes > self.limit_bytes:
                self.used_bytes -= _size(self._entries.popitem(last=False)[1])

    def get(self, key: bytes) -> KeptPositions | None:
        """The positions of the chunk `key`, if they are known."""
        with self._lock:
            return self._entries.get(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """The chunks of `keys` are in use: forget others first."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
            self.used_bytes = 0


def _size(kept: KeptPositions) -> int:
    return kept.bits.nbytes + _ENTRY_BYTES
