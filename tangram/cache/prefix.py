"""The prefix cache: tokens → pages that already hold their KV entries.

Links have the keys of `keys.py`. They are sealed chunks (`C` tokens) and, below the last sealed
chunk, raw pages (`P` tokens). The pages of a chunk's sliding-window groups are a leaf of their own
below it, so that they can be evicted while the chunk stays. So is the recurrent state behind a
chunk. Unused links are evicted least recently
used first, leaves before parents. Sealed chunks go to host memory, if there is some.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tangram.cache.host import HostTier
from tangram.cache.keys import ChunkKeys, state_key
from tangram.cache.pages import Ledger
from tangram.types import Int32, Int64
from tangram.watch import ChunkPlace, LinkChange, LinkDropped


class Link(Enum):
    """What a link holds: a sealed chunk (full-attention groups), its window part, the recurrent
    state behind it, or a raw page.
    """

    CHUNK = "chunk"
    WINDOW = "window"
    STATE = "state"
    RAW = "raw"


@dataclass(eq=False)
class Node:
    """One link. The cache holds one reference to each of `pages`; `users` counts its sequences."""

    key: bytes
    parent: Node | None
    pages: Int32
    link: Link
    users: int = 0
    children: int = 0
    last_used: int = 0

    @property
    def transient(self) -> bool:
        """Whether a running sequence may release it before it ends."""
        return self.link in (Link.WINDOW, Link.RAW)


@dataclass(frozen=True)
class Chain:
    """Keys of a sequence's first sealed chunks, and of the window parts of the newest of them.

    `state` is the key of the recurrent state behind the last. `known` counts the chunks that the
    cache has, of which those behind this state are left out.
    """

    chunks: list[bytes]
    windows: list[bytes]
    state: bytes | None = None
    known: int = 0

    @property
    def keys(self) -> list[bytes]:
        """All of them, parents before children."""
        return [*self.chunks, *self.windows, *([] if self.state is None else [self.state])]


@dataclass
class PrefixCache:
    """Links by key over a ledger, with host memory behind it.

    `idle_pages` could be evicted now. `crowded_pages` counts the transient pages that more than one
    sequence uses, once for each further sequence: each may need a page of its own later.
    `changes`, unless None, notes chunks that are gone. With `states` a chain ends where the
    recurrent state behind it is known.
    """

    ledger: Ledger
    host: HostTier
    states: bool = False
    nodes: dict[bytes, Node] = field(default_factory=dict)
    idle_pages: int = 0
    crowded_pages: int = 0
    changes: list[LinkChange] | None = None
    _clock: int = 0
    _heap: list[tuple[int, bytes]] = field(default_factory=list)

    def find(self, key: bytes) -> Node | None:
        """The link with this key, if it is still here."""
        return self.nodes.get(key)

    def longest(
        self, keys: ChunkKeys, tokens: Int64, knows: Callable[[bytes], bool] | None = None
    ) -> Chain:
        """The longest chain of `tokens` int64 [n] of links that are known; None: see `knows`.

        One token is left to compute. The next query must find what it sees in its windows, so
        chunks without these parts are left out.
        """
        knows = self.knows if knows is None else knows
        layout, chunks = keys.retention.layout, list[bytes]()
        for number in range(1, (len(tokens) - 1) // layout.chunk_tokens + 1):
            key = keys.after(number, tokens)
            if not knows(key):
                break
            chunks.append(key)
        known = len(chunks)
        while chunks:
            state = state_key(chunks[-1]) if self.states else None
            if state is not None and not knows(state):
                chunks.pop()
                continue
            first = max(0, len(chunks) - layout.window_chunks)
            windows = [
                keys.window_after(number + 1, tokens) for number in range(first, len(chunks))
            ]
            if all(map(knows, windows)):
                return Chain(chunks, windows, state, known)
            chunks.pop()
        return Chain([], [], None, known)

    def knows(self, key: bytes) -> bool:
        """Whether the link with this key is on the device or in host memory."""
        return key in self.nodes or key in self.host.links

    def insert(self, key: bytes, parent: Node | None, pages: Int32, link: Link) -> Node:
        """A new link used by nobody yet; the cache takes its own reference to `pages` int32 [n]."""
        node = Node(key, parent, pages, link)
        self.nodes[key] = node
        self.ledger.share(pages)
        if parent is not None:
            parent.children += 1
        self.idle_pages += len(pages)
        return node

    def acquire(self, node: Node) -> None:
        """One more sequence uses `node`: it cannot be evicted."""
        if node.users == 0:
            self.idle_pages -= len(node.pages)
        elif node.transient:
            self.crowded_pages += len(node.pages)
        node.users += 1

    def release(self, node: Node) -> None:
        """One sequence fewer uses `node`."""
        node.users -= 1
        if node.users == 0:
            self.idle_pages += len(node.pages)
            self._clock += 1
            node.last_used = self._clock
            self._offer(node)
        elif node.transient:
            self.crowded_pages -= len(node.pages)

    def evict(self, pages: int, *, keep: bool = True) -> None:
        """Free at least `pages` pages of unused links, or all there are.

        `keep` offers the links to the host tier.
        """
        target = self.ledger.free + pages
        while self.ledger.free < target and self._heap:
            stamp, key = heapq.heappop(self._heap)
            node = self.nodes.get(key)
            if node is not None and _evictable(node) and node.last_used == stamp:
                if keep and node.link is not Link.RAW:
                    self.host.offer(node.key, node.pages, node.parent.key if node.parent else None)
                self.remove(node)

    def clear(self) -> None:
        """Evict every unused link, from host memory too."""
        self.evict(self.ledger.total, keep=False)
        self.host.clear()

    def _offer(self, node: Node) -> None:
        if _evictable(node):
            heapq.heappush(self._heap, (node.last_used, node.key))
        # Links in steady use leave a stale entry each time. Without evictions nothing else removes
        # them.
        if len(self._heap) > 2 * len(self.nodes) + 64:
            self._heap = [
                (link.last_used, link.key) for link in self.nodes.values() if _evictable(link)
            ]
            heapq.heapify(self._heap)

    def remove(self, node: Node) -> None:
        """Forget a link that has no users and no children."""
        del self.nodes[node.key]
        self.idle_pages -= len(node.pages)
        self.ledger.release(node.pages)
        if node.link is Link.STATE:
            self.host.clear_pages(node.pages)
        if self.changes is not None and node.link is Link.CHUNK:
            self.changes.append(LinkDropped(node.key, ChunkPlace.DEVICE))
        if node.parent is not None:
            node.parent.children -= 1
            self._offer(node.parent)


def _evictable(node: Node) -> bool:
    return node.users == 0 and node.children == 0
