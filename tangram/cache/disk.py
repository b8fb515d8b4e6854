"""The disk behind host memory: links are written beside the steps, and read before a prompt runs.

What a prompt needs is read whole, checked, and handed to host memory; from there it comes to the
pool like anything else. So the scheduler never counts on a link that the disk may not give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

from tangram.types import Int32, LinkName

MOST_WAITING_BYTES = 256 << 20  # of links that wait to be written; what comes then is dropped
_log = logging.getLogger("tangram")


class LinkStore(Protocol):
    """Links by name, as `DiskStore` keeps them; see there."""

    @property
    def links(self) -> int:
        """How many it has."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that they occupy."""
        ...

    @property
    def corrupt(self) -> int:
        """Links since the start that were not what they should be."""
        ...

    @property
    def limit_bytes(self) -> int:
        """The most bytes of all links."""
        ...

    @property
    def epoch(self) -> int:
        """A number that grows when links are forgotten."""
        ...

    def has(self, name: LinkName) -> bool:
        """Whether it has the link, sound or not."""
        ...

    def advise(self, names: Sequence[LinkName]) -> None:
        """`names` are read next, in this order."""
        ...

    def read(self, name: LinkName, shape: tuple[int, int]) -> Int32 | None:
        """Its pages, int32 of `shape`, if it has them and they are sound."""
        ...

    def write(self, name: LinkName, words: Int32, epoch: int) -> bool:
        """Keep the pages `words` int32 [n, words of a page], unless `epoch` is over."""
        ...

    def touch(self, names: Sequence[LinkName]) -> None:
        """`names`, parents before their children, are in use."""
        ...

    def look(self, limit_bytes: int) -> None:
        """Count the links, and remove what is beyond the limit."""
        ...

    def forget(self, root: bytes) -> None:
        """Remove all chains that begin with the chunk `root`."""
        ...

    def clear(self) -> None:
        """Remove all links."""
        ...


@dataclass(frozen=True)
class WantedLink:
    """A link that is asked of the disk: so many `pages`, below the link `parent`."""

    name: LinkName
    pages: int
    parent: bytes | None


@dataclass(frozen=True, eq=False)
class Fetch:
    """Links that are being read, in the order of their chain. `epoch` is that of the store."""

    links: Sequence[WantedLink]
    found: Sequence[Future[Int32 | None]]
    epoch: int

    @property
    def done(self) -> bool:
        """Whether everything has been read."""
        return all(found.done() for found in self.found)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is done, at most so long."""
        wait(self.found, timeout_s)


class DiskTier:
    """Reads and writes links of `store` on executors of their own; pages have `page_bytes`.

    Counters since the start: `hits` links that were read, and `misses` prompts of which no place
    had every chunk.
    """

    def __init__(
        self, store: LinkStore, page_bytes: int, reader: Executor, writer: Executor
    ) -> None:
        self.store, self.page_bytes = store, page_bytes
        self._reader, self._writer = reader, writer
        self.hits = self.misses = 0
        # Each by one thread alone: that of the steps, and that which writes.
        self._accepted_bytes = self._declined = 0
        self._ended_bytes = self._failed = 0
        self._is_refused = False
        self._look()

    @property
    def dropped(self) -> int:
        """Links since the start that were not written."""
        return self._declined + self._failed

    def fetch(self, links: Sequence[WantedLink]) -> Fetch:
        """Begin to read `links`."""
        self._reader.submit(self.store.advise, [link.name for link in links])
        found = [self._reader.submit(self._read, link) for link in links]
        return Fetch(links, found, self.store.epoch)

    def take(self, fetch: Fetch) -> list[Int32 | None]:
        """What was read of the links of `fetch`, once it is done; None for each that is lost."""
        found = [each.result() for each in fetch.found]
        if fetch.epoch != self.store.epoch:
            return [None] * len(found)
        self.hits += sum(words is not None for words in found)
        return found

    def accepts(self, size_bytes: int) -> bool:
        """Whether `save` takes a link of so many bytes now. If not, it counts as dropped."""
        room = self._accepted_bytes - self._ended_bytes + size_bytes <= MOST_WAITING_BYTES
        self._declined += not room
        return room

    def save(self, name: LinkName, size_bytes: int, read: Callable[[], Int32]) -> None:
        """Write link `name`, of so many bytes, when there is time: `read` gives its pages then."""
        self._accepted_bytes += size_bytes
        self._writer.submit(self._write, name, size_bytes, read, self.store.epoch)

    def touch(self, names: Sequence[LinkName]) -> None:
        """`names`, parents before their children, are in use."""
        self._writer.submit(self.store.touch, names)

    def forget(self, root: bytes) -> None:
        """Forget the chains that begin with the chunk `root`, and what waits to be written."""
        self.store.forget(root)
        self._look()

    def clear(self) -> None:
        """Forget every link, and what waits to be written."""
        self.store.clear()
        self._look()

    def close(self) -> None:
        """Write what waits, and end."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _look(self) -> None:
        self._writer.submit(self.store.look, self.store.limit_bytes)

    def _read(self, link: WantedLink) -> Int32 | None:
        try:
            return self.store.read(link.name, (link.pages, self.page_bytes // 4))
        except Exception as error:
            _log.warning("KV pages cannot be read from disk, they are computed again: %r", error)
            return None

    def _write(
        self, name: LinkName, size_bytes: int, read: Callable[[], Int32], epoch: int
    ) -> None:
        try:
            self._failed += not self.store.write(name, read(), epoch)
            self._is_refused = False
        except Exception as error:
            self._failed += 1
            if not self._is_refused:  # once: a full disk stays full
                kind = type(error).__name__
                _log.warning("KV pages cannot be written to disk: %s: %s", kind, error)
            self._is_refused = True
        finally:
            self._ended_bytes += size_bytes
