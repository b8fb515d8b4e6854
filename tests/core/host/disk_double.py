"""A disk in memory, and executors that work when they are told to."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from tangram.cache.disk import DiskTier
from tangram.types import Int32, LinkName


class DeferredExecutor(Executor):
    """Does what is submitted in `run`, in order."""

    def __init__(self) -> None:
        self.jobs = deque[Callable[[], None]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self.jobs.append(work)
        return future

    def run(self, most: int | None = None) -> None:
        for _ in range(len(self.jobs) if most is None else min(most, len(self.jobs))):
            self.jobs.popleft()()


class DictStore:
    """A `LinkStore` of up to `most` links, whose pages are whatever a device double has in them."""

    limit_bytes = used_bytes = corrupt = 0

    def __init__(self, most: int) -> None:
        self.most, self.epoch = most, 0
        self.kept = OrderedDict[LinkName, Any]()

    @property
    def links(self) -> int:
        return len(self.kept)

    def has(self, name: LinkName) -> bool:
        return name in self.kept

    def advise(self, names: Sequence[LinkName]) -> None:
        """Nothing is read ahead."""

    def read(self, name: LinkName, shape: tuple[int, int]) -> Int32 | None:
        found = self.kept.get(name)
        assert found is None or len(found) == shape[0], "a link has another size"
        return found

    def write(self, name: LinkName, words: Int32, epoch: int) -> bool:
        if epoch != self.epoch:
            return False
        self.kept[name] = words
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)
        return True

    def touch(self, names: Sequence[LinkName]) -> None:
        for name in reversed(names):
            if name in self.kept:
                self.kept.move_to_end(name)

    def look(self, limit_bytes: int) -> None:
        """It is always counted."""

    def forget(self, root: bytes) -> None:
        self.epoch += 1
        for name in [name for name in self.kept if name.root == root]:
            del self.kept[name]

    def clear(self) -> None:
        self.epoch += 1
        self.kept.clear()

    def lose(self, which: int) -> None:
        """One of the links is damaged: it is there, until it is read."""
        if self.kept:
            self.kept[[*self.kept][which % len(self.kept)]] = None


class DiskDouble(DiskTier):
    """A `DiskTier` over `store` whose threads are told when to work."""

    def __init__(self, store: DictStore) -> None:
        self.reading, self.writing = DeferredExecutor(), DeferredExecutor()
        super().__init__(store, 4, self.reading, self.writing)
