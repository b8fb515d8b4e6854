"""Host memory behind the pool: links that fell out of the device, by prefix key. Integers only.

The tier is inclusive: what comes back keeps its copy, so that the device can let it go again for
nothing. What is to be copied is noted as `PageMove`s, in the order in which it must happen; the
device makes them before the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tangram.cache.pages import Ledger
from tangram.types import Int32, PageMove


class HostTier:
    """Links over `total` host pages, least recently used first out; with 0 pages it keeps nothing.

    `arriving` bool [device pages] marks what moves that nobody has taken yet will fill. Counters
    since the start: `dropped` links that had to leave or found no room, `pages_out` and `pages_in`
    moved, and `restored_tokens`, which the owner counts.
    """

    def __init__(self, total: int, device_pages: int) -> None:
        self.ledger = Ledger(total)
        self.links: OrderedDict[bytes, Int32] = OrderedDict()
        self.arriving = np.zeros(device_pages, np.bool_)
        self.dropped = self.pages_out = self.pages_in = self.restored_tokens = 0
        self._parents: dict[bytes, bytes] = {}
        self._moves: list[PageMove] = []
        self._held: frozenset[bytes] = frozenset()

    @property
    def total(self) -> int:
        """Host pages."""
        return self.ledger.total

    @property
    def used(self) -> int:
        """Host pages that links occupy."""
        return self.ledger.total - self.ledger.free

    @contextmanager
    def holding(self, chain: Sequence[bytes]) -> Iterator[None]:
        """Those of `chain` that are here are in use now, parents after children, and none of them
        is let go within.
        """
        for key in reversed(chain):
            if key in self.links:
                self.links.move_to_end(key)
        self._held = frozenset(chain)
        try:
            yield
        finally:
            self._held = frozenset()

    def offer(self, key: bytes, pages: Int32, parent: bytes | None = None) -> None:
        """The device lets go of link `key` below `parent`: copy its `pages` unless there is a copy
        or no room.
        """
        if key in self.links:
            self.links.move_to_end(key)
        elif self.arriving[pages].any() or not self._make_room(
            len(pages)
        ):  # what is still to come cannot leave yet
            self.dropped += 1
        else:
            self.links[key] = self.ledger.take(len(pages))
            if parent is not None:
                self._parents[key] = parent
            self._note(PageMove(pages, self.links[key], inward=False))
            self.pages_out += len(pages)

    def restore(self, key: bytes, pages: Int32) -> None:
        """Copy link `key` to device `pages`."""
        self._note(PageMove(pages, self.links[key], inward=True))
        self.arriving[pages] = True
        self.pages_in += len(pages)

    def take_moves(self) -> tuple[PageMove, ...]:
        """What was noted since the last call. The next step but one, at the latest, must find it
        done.
        """
        moves, self._moves = tuple(self._moves), []
        for move in moves:
            self.arriving[move.pages] = False
        return moves

    def clear(self) -> None:
        """Forget every link. Moves that were noted are still made: sequences stand on what they
        bring.
        """
        for key in list(self.links):
            self._drop(key)

    def forget(self, keys: set[bytes]) -> None:
        """Forget the links of `keys`, and those that descend from them; as in `clear`, moves are
        still made.
        """
        lost = set(keys)
        while found := [key for key in self.links if key in lost or self._parents.get(key) in lost]:
            lost.update(found)
            for key in found:
                self._drop(key)

    def check(self) -> None:
        """Raise `IntegrityError` unless every host page belongs to one link or is free."""
        expected = np.zeros(self.total, np.int32)
        for slots in self.links.values():
            expected[slots] += 1
        self.ledger.check(expected)

    def _drop(self, key: bytes) -> None:
        self.ledger.release(self.links.pop(key))
        self._parents.pop(key, None)

    def _note(self, move: PageMove) -> None:
        if len(move.pages):
            self._moves.append(move)

    def _make_room(self, count: int) -> bool:
        if count > self.total or not self.total:
            return False
        while self.ledger.free < count:
            oldest = next(iter(self.links))
            if oldest in self._held:
                return False
            self._drop(oldest)
            self.dropped += 1
        return True
