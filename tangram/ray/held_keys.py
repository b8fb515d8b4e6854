"""The chunk keys that an engine has met lately, newest last: what its digest is made of."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tangram.watch import ChunkPlace, ChunkStored, News, Readings, Watched


class HeldKeys:
    """An observer of one engine. It remembers the last `most` keys of sealed chunks.

    An engine tells of sequences, not of evictions. So `list_held` asks for each key whether its
    chunk is still there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys = OrderedDict[bytes, None]()
        self._lock = threading.Lock()

    def observe(self, news: News, readings: Readings) -> None:
        """Note the chunks of sequences that have changed, and new ones. See `Observer`."""
        with self._lock:
            for change in news.changes:
                for key in reversed(change.reading.chunk_keys):  # a chain loses its end first
                    self._keys[key] = None
                    self._keys.move_to_end(key)
            for link in news.links:
                if isinstance(link, ChunkStored) and link.key not in self._keys:
                    self._keys[link.key] = None  # it goes before those that it follows
                    self._keys.move_to_end(link.key, last=False)
            while len(self._keys) > self._most:
                self._keys.popitem(last=False)

    def list_held(self, watched: Watched) -> Sequence[bytes]:
        """The keys whose chunks are on the device or in host memory, used last first."""
        with self._lock:
            known = list(reversed(self._keys))
        uses = watched.uses(known)
        gone = [key for key, use in zip(known, uses, strict=True) if use.place is ChunkPlace.GONE]
        with self._lock:
            for key in gone:
                self._keys.pop(key, None)
        missing = set(gone)
        return [key for key in known if key not in missing]
