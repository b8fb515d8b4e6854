"""Host memory behind the pool: links that the device evicted, by prefix key. Integers only.

The tier is inclusive: a link that is restored keeps its host copy, so that the device can evict it
again without copying. Copies are noted as `Move`s in the order in which they must happen. The
device makes them before the next step. Links that were read from disk come in here, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tangram.cache.pages import Ledger
from tangram.types import HostFill, Int32, LinkName, LinkTouch, Move, PageMove, PageSave
from tangram.watch import ChunkPlace, LinkChange, LinkDropped, LinkOffloaded


class HostTier:
    """Links over `total` host pages, evicted least recently used first. With 0 pages it is empty.

    `arriving` bool [device pages] marks the pages that moves will fill which nobody has taken yet.
    Counters since the start: `dropped` links that were evicted or did not fit, `pages_out` and
    `pages_in` moved, and `restored_tokens`, which the owner counts. `changes`, unless None, notes
    links that come and go.
    """

    def __init__(self, total: int, device_pages: int) -> None:
        self.ledger = Ledger(total)
        self.links: OrderedDict[bytes, Int32] = OrderedDict()
        self.arriving = np.zeros(device_pages, np.bool_)
        self.dropped = self.pages_out = self.pages_in = self.restored_tokens = 0
        self._parents: dict[bytes, bytes] = {}
        self._moves: list[Move] = []
        self._held: frozenset[bytes] = frozenset()
        self.changes: list[LinkChange] | None = None

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
        """Protect the links of `chain` that are here from eviction, and `mark` them."""
        self.mark(chain)
        self._held = frozenset(chain)
        try:
            yield
        finally:
            self._held = frozenset()

    def mark(self, chain: Sequence[bytes]) -> None:
        """The links of `chain` that are here are in use, parents before their children."""
        for key in reversed(chain):
            if key in self.links:
                self.links.move_to_end(key)

    def offer(self, key: bytes, pages: Int32, parent: bytes | None = None) -> None:
        """The device evicts link `key` below `parent`: copy its `pages` int32 [n] to the host.

        Nothing is copied if the host has the link already, or if its pages do not fit.
        """
        if key in self.links:
            self.links.move_to_end(key)
        elif self.arriving[pages].any() or not self._evict_for(
            len(pages)
        ):  # what has not arrived yet cannot leave
            self.dropped += 1
        else:
            self._note(PageMove(pages, self._enter(key, len(pages), parent), inward=False))
            self.pages_out += len(pages)

    def restore(self, key: bytes, pages: Int32) -> None:
        """Copy link `key` to device `pages` int32 [n]."""
        self._note(PageMove(pages, self.links[key], inward=True))
        self.arriving[pages] = True
        self.pages_in += len(pages)

    def fill(self, key: bytes, words: Int32, parent: bytes | None) -> bool:
        """Keep link `key` below `parent`, whose pages int32 [n, words of a page] were on disk.

        False, and it is dropped, if its pages do not fit.
        """
        if not self._evict_for(len(words)):
            self.dropped += 1
            return False
        self._moves.append(HostFill(self._enter(key, len(words), parent), words))
        return True

    def save(self, name: LinkName, pages: Int32) -> None:
        """Write link `name`, whose `pages` int32 [n] are on the device, to disk."""
        self._moves.append(PageSave(pages, name))

    def touch(self, names: Sequence[LinkName]) -> None:
        """The links of `names`, parents before their children, are in use.

        The disk is told behind the links that were saved before: some of `names` may be these.
        """
        self._moves.append(LinkTouch(names))

    def drop_saves(self, root: bytes | None = None) -> None:
        """Write nothing of what was noted: all links, or those of chains that begin with `root`."""
        self._moves = [
            move
            for move in self._moves
            if not isinstance(move, PageSave) or root not in (None, move.name.root)
        ]

    def take_moves(self) -> tuple[Move, ...]:
        """The moves noted since the last call.

        They must be done before the next step but one begins.
        """
        moves, self._moves = tuple(self._moves), []
        for move in moves:
            if isinstance(move, PageMove):
                self.arriving[move.pages] = False
        return moves

    def clear_pages(self, pages: Int32) -> None:
        """Fill `pages` int32 [n] of the device with zeros, before anything else takes them.

        They held no KV entries: their bytes may read as NaN, and zero times NaN is NaN.
        """
        self._note(PageMove(pages, None, inward=True))

    def clear(self) -> None:
        """Forget every link.

        Moves already noted are still made, because sequences use their pages.
        """
        for key in list(self.links):
            self._drop(key)

    def forget(self, keys: set[bytes]) -> None:
        """Forget the links of `keys` and their descendants. As in `clear`, moves are still made."""
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

    def _enter(self, key: bytes, count: int, parent: bytes | None) -> Int32:
        """`count` host pages, int32 [count], which are free, for link `key` below `parent`."""
        slots = self.links[key] = self.ledger.take(count)
        if parent is not None:
            self._parents[key] = parent
        if self.changes is not None:
            self.changes.append(LinkOffloaded(key))
        return slots

    def _drop(self, key: bytes) -> None:
        self.ledger.release(self.links.pop(key))
        self._parents.pop(key, None)
        if self.changes is not None:
            self.changes.append(LinkDropped(key, ChunkPlace.HOST))

    def _note(self, move: PageMove) -> None:
        if len(move.pages):
            self._moves.append(move)

    def _evict_for(self, count: int) -> bool:
        if count > self.total or not self.total:
            return False
        while self.ledger.free < count:
            oldest = next(iter(self.links))
            if oldest in self._held:
                return False
            self._drop(oldest)
            self.dropped += 1
        return True
