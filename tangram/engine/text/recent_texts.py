"""What was made of texts recently."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentTexts(Generic[T]):
    """The `most` entries that were used last, by texts of `most_characters` together.

    Safe to share between threads.
    """

    def __init__(self, most: int, most_characters: int) -> None:
        self._most, self._most_characters, self._characters = most, most_characters, 0
        self._entries = OrderedDict[tuple[str, ...], T]()
        self._lock = threading.Lock()

    def find(self, key: tuple[str, ...]) -> T | None:
        """What was kept by `key`, None if nothing is."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def keep(self, key: tuple[str, ...], value: T) -> None:
        """Keep `value` by `key`, and let go of entries that were not used for longest."""
        with self._lock:
            if key not in self._entries:
                self._characters += sum(map(len, key))
            self._entries[key] = value
            while len(self._entries) > self._most or self._characters > self._most_characters:
                oldest, _ = self._entries.popitem(last=False)
                self._characters -= sum(map(len, oldest))
