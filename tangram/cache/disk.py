"""The disk behind host memory: links are written beside the steps, and read before a prompt runs.

What a prompt needs is read whole, checked, and handed to host memory; from there it comes to the
pool like anything else. So the scheduler never counts on a link that the disk may not give.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from tangram.types import Int32, LinkName

MOST_WAITING_BYTES = 256 << 20  # of links that wait to be written; what comes then is dropped
MOST_CLOSE_S = 30.0  # for what waits at the end: a disk that writes 10 MB in a second has done it
_TOUCH_BYTES = 256  # of the objects of one name that waits
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


@dataclass(eq=False)
class _Read:
    """A link of so many `pages` that is being read for `users` fetches.

    `epoch` is that of the store when it began.
    """

    found: Future[Int32 | None]
    pages: int
    epoch: int
    users: int = 0


@dataclass(eq=False)
class Fetch:
    """`links` that are to be read, in order, for a prompt with the prefix keys `chain`.

    The prompt is not to wait beyond `deadline_s` of the monotonic clock. There are no `reads` until
    it has `begun`.
    """

    chain: Sequence[bytes]
    links: Sequence[WantedLink]
    deadline_s: float
    reads: dict[LinkName, _Read] = field(default_factory=dict)
    begun: bool = False

    def has_read(self, name: LinkName) -> bool:
        """Whether link `name` has been read, sound or not."""
        return name in self.reads and self.reads[name].found.done()

    def wait(self, timeout_s: float) -> None:
        """Wait until everything has been read, at most so long."""
        wait([read.found for read in self.reads.values()], timeout_s)


class DiskTier:
    """Reads and writes links of `store` on executors of their own; pages have `page_bytes`.

    Counters since the start: `hits` links that were read and used, and `misses` prompts of which
    no place had every chunk. `reading_pages` are those of the links that are being read, or were
    and have not been taken.
    """

    def __init__(
        self, store: LinkStore, page_bytes: int, reader: Executor, writer: Executor
    ) -> None:
        self.store, self.page_bytes = store, page_bytes
        self._reader, self._writer = reader, writer
        self.hits = self.misses = self.reading_pages = 0
        self._reads: dict[LinkName, _Read] = {}
        self._late: list[Future[Int32 | None]] = []
        # Each by one thread alone: that of the steps, and that which writes.
        self._accepted_bytes = self._declined = 0
        self._ended_bytes = self._failed = 0
        self._is_refused = False
        self._look()

    @property
    def dropped(self) -> int:
        """Links since the start that were not written."""
        return self._declined + self._failed

    @property
    def hangs(self) -> bool:
        """Whether a read that was awaited for too long has still not ended."""
        self._late = [found for found in self._late if not found.done()]
        return bool(self._late)

    def count_new_pages(self, links: Sequence[WantedLink]) -> int:
        """The pages of those of `links` that are not being read."""
        return sum(link.pages for link in links if self._find_read(link.name) is None)

    def begin(self, fetch: Fetch, links: Sequence[WantedLink]) -> None:
        """Begin to read `links` for `fetch`, which wants no others any more.

        What is being read for others is not read again.
        """
        new = [link for link in links if self._find_read(link.name) is None]
        if new:
            self._reader.submit(self.store.advise, [link.name for link in new])
        for link in new:
            found = self._reader.submit(self._read, link)
            self._reads[link.name] = _Read(found, link.pages, self.store.epoch)
            self.reading_pages += link.pages
        fetch.links, fetch.begun = links, True
        fetch.reads = {link.name: self._reads[link.name] for link in links}
        for read in fetch.reads.values():
            read.users += 1

    def take(self, fetch: Fetch) -> dict[bytes, Int32]:
        """End `fetch`: the sound links that were read by now, by key."""
        found = dict[bytes, Int32]()
        for name, read in fetch.reads.items():
            if not read.found.done():
                self._late += [read.found] * read.found.running()
            elif read.epoch == self.store.epoch and (words := read.found.result()) is not None:
                found[name.key] = words
        self.drop(fetch)
        return found

    def drop(self, fetch: Fetch) -> None:
        """Read nothing for `fetch` any more, unless others want it, too."""
        for name, read in fetch.reads.items():
            read.users -= 1
            if not read.users:
                read.found.cancel()
                self.reading_pages -= read.pages
                if self._reads.get(name) is read:
                    del self._reads[name]
        fetch.reads = {}

    def _find_read(self, name: LinkName) -> _Read | None:
        """What reads link `name`, if that began since links were last forgotten."""
        read = self._reads.get(name)
        return read if read is not None and read.epoch == self.store.epoch else None

    def accepts(self, size_bytes: int) -> bool:
        """Whether `save` takes a link of so many bytes now. If not, it counts as dropped."""
        room = self._has_room(size_bytes)
        self._declined += not room
        return room

    def _has_room(self, size_bytes: int) -> bool:
        return self._accepted_bytes - self._ended_bytes + size_bytes <= MOST_WAITING_BYTES

    def save(self, name: LinkName, size_bytes: int, read: Callable[[], Int32]) -> None:
        """Write link `name`, of so many bytes, when there is time: `read` gives its pages then."""
        self._accepted_bytes += size_bytes
        self._writer.submit(self._write, name, size_bytes, read, self.store.epoch)

    def touch(self, names: Sequence[LinkName]) -> None:
        """`names`, parents before their children, are in use.

        That is forgotten while too much waits: the links are then as old as their files.
        """
        size_bytes = len(names) * _TOUCH_BYTES
        if self._has_room(size_bytes):
            self._accepted_bytes += size_bytes
            self._writer.submit(self._touch, names, size_bytes)

    def forget(self, root: bytes) -> None:
        """Forget the chains that begin with the chunk `root`, and what waits to be written."""
        self.store.forget(root)
        self._look()

    def clear(self) -> None:
        """Forget every link, and what waits to be written."""
        self.store.clear()
        self._look()

    def close(self) -> None:
        """Write what waits, and end. A disk that hangs is not awaited for long."""
        ending = threading.Thread(target=self._shut_down, name="tangram-disk-end", daemon=True)
        ending.start()
        ending.join(MOST_CLOSE_S)
        if ending.is_alive():
            _log.warning(
                "the disk of kv_disk_path has not ended its work within %s s, and %d bytes are not "
                "written: see whether it answers",
                MOST_CLOSE_S,
                self._accepted_bytes - self._ended_bytes,
            )
            self._writer.shutdown(wait=False, cancel_futures=True)

    def _shut_down(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()
        self._reader.shutdown()

    def _look(self) -> None:
        self._writer.submit(self.store.look, self.store.limit_bytes)

    def _read(self, link: WantedLink) -> Int32 | None:
        try:
            return self.store.read(link.name, (link.pages, self.page_bytes // 4))
        except Exception as error:
            _log.warning("KV pages cannot be read from disk, they are computed again: %r", error)
            return None

    def _touch(self, names: Sequence[LinkName], size_bytes: int) -> None:
        try:
            self.store.touch(names)
        finally:
            self._ended_bytes += size_bytes

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
