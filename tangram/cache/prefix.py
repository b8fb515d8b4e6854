"""The prefix cache: tokens → pages that already hold their KV entries.

A chain of keys, each SHA-256 over its parent's key and its own tokens, starts from (profile fingerprint, salt). Links
are sealed chunks (`C` tokens) and, below the last sealed chunk, raw pages (`P` tokens). The pages of sliding-window
groups of a chunk hang below it as a leaf of their own, so that they can go while the chunk stays. By the purity law
equal keys mean equal contents, whoever computed them. What nobody uses is evicted least recently used first, leaves
before parents; sealed chunks go to host memory, if there is some.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field
from enum import Enum

from tangram.cache.host import HostTier
from tangram.cache.layout import Layout
from tangram.cache.pages import Ledger
from tangram.types import Int32, Int64


def root_key(fingerprint: str, salt: str) -> bytes:
    """The start of a chain: sequences with another profile or another salt share nothing."""
    # A salt is any string a client sends, lone surrogates included.
    return hashlib.sha256(f"{len(fingerprint)}:{fingerprint}:{salt}".encode(errors="surrogatepass")).digest()


def chunk_key(parent: bytes, tokens: Int64) -> bytes:
    """The key of the sealed chunk of `tokens` (int64) after the chain that ends in `parent`."""
    return hashlib.sha256(parent + tokens.tobytes()).digest()


def raw_key(parent: bytes, tokens: Int64) -> bytes:
    """The key of the raw page of `tokens` (int64) after the chain in `parent`; also with C = P no chunk's."""
    return hashlib.sha256(parent + tokens.tobytes() + b"raw").digest()


def window_key(chunk: bytes) -> bytes:
    """The key of the sliding-window part of a sealed chunk."""
    return hashlib.sha256(chunk + b"window").digest()


class Link(Enum):
    """What a link holds: a sealed chunk of the full-attention groups, its sliding-window part, or a raw page."""

    CHUNK = "chunk"
    WINDOW = "window"
    RAW = "raw"


@dataclass(eq=False)
class Node:
    """One link: the cache holds one reference to each of `pages`. `users` counts the sequences that stand on it."""

    key: bytes
    parent: Node | None
    pages: Int32
    link: Link
    users: int = 0
    children: int = 0
    last_used: int = 0

    @property
    def transient(self) -> bool:
        """Whether a sequence that goes on living may let it go."""
        return self.link is not Link.CHUNK


@dataclass(frozen=True)
class Chain:
    """Keys of sealed chunks that follow on each other after `root`, and of the window parts of the newest of them."""

    root: bytes
    chunks: list[bytes]
    windows: list[bytes]

    @property
    def keys(self) -> list[bytes]:
        """All of them, parents before children."""
        return self.chunks + self.windows


@dataclass
class PrefixCache:
    """Links by key over a ledger, with host memory behind it. `idle_pages` could be evicted now; `crowded_pages` counts
    the transient pages that more than one sequence stands on, once for each further sequence: each of them may need a
    page of its own later."""

    ledger: Ledger
    host: HostTier
    nodes: dict[bytes, Node] = field(default_factory=dict)
    idle_pages: int = 0
    crowded_pages: int = 0
    _clock: int = 0
    _heap: list[tuple[int, bytes]] = field(default_factory=list)

    def find(self, key: bytes) -> Node | None:
        """The link with this key, if it is still here."""
        return self.nodes.get(key)

    def longest(self, layout: Layout, root: bytes, tokens: Int64) -> Chain:
        """What the device or host memory has of `tokens` after `root`, so that one of them at least is left to compute.

        The next query must find in its windows what it sees, so chunks without these parts are left out.
        """
        key, chunks = root, list[bytes]()
        for begin in range(0, len(tokens) - layout.chunk_tokens, layout.chunk_tokens):
            key = chunk_key(key, tokens[begin : begin + layout.chunk_tokens])
            if not self._known(key):
                break
            chunks.append(key)
        while chunks:
            windows = [window_key(key) for key in chunks[max(0, len(chunks) - layout.window_chunks) :]]
            if all(map(self._known, windows)):
                return Chain(root, chunks, windows)
            chunks.pop()
        return Chain(root, [], [])

    def _known(self, key: bytes) -> bool:
        return key in self.nodes or key in self.host.links

    def insert(self, key: bytes, parent: Node | None, pages: Int32, link: Link) -> Node:
        """A new link used by nobody yet; the cache takes its own reference to `pages`."""
        node = Node(key, parent, pages, link)
        self.nodes[key] = node
        self.ledger.share(pages)
        if parent is not None:
            parent.children += 1
        self.idle_pages += len(pages)
        return node

    def acquire(self, node: Node) -> None:
        """One more sequence stands on `node`: it cannot be evicted."""
        if node.users == 0:
            self.idle_pages -= len(node.pages)
        elif node.transient:
            self.crowded_pages += len(node.pages)
        node.users += 1

    def release(self, node: Node) -> None:
        """One sequence fewer stands on `node`."""
        node.users -= 1
        if node.users == 0:
            self.idle_pages += len(node.pages)
            self._clock += 1
            node.last_used = self._clock
            self._offer(node)
        elif node.transient:
            self.crowded_pages -= len(node.pages)

    def evict(self, pages: int, *, keep: bool = True) -> None:
        """Free at least `pages` pages of links that nobody uses, or all there are. `keep` offers them to the host."""
        target = self.ledger.free + pages
        while self.ledger.free < target and self._heap:
            stamp, key = heapq.heappop(self._heap)
            node = self.nodes.get(key)
            if node is not None and _evictable(node) and node.last_used == stamp:
                if keep and node.link is not Link.RAW:
                    self.host.offer(node.key, node.pages, node.parent.key if node.parent else None)
                self.remove(node)

    def clear(self) -> None:
        """Evict everything that nobody uses, from host memory too."""
        self.evict(self.ledger.total, keep=False)
        self.host.clear()

    def _offer(self, node: Node) -> None:
        if _evictable(node):
            heapq.heappush(self._heap, (node.last_used, node.key))
        # Links in steady use leave a stale entry each time: without evictions nobody else would clear them away.
        if len(self._heap) > 2 * len(self.nodes) + 64:
            self._heap = [(link.last_used, link.key) for link in self.nodes.values() if _evictable(link)]
            heapq.heapify(self._heap)

    def remove(self, node: Node) -> None:
        """Forget a link that nobody uses and that has no children."""
        del self.nodes[node.key]
        self.idle_pages -= len(node.pages)
        self.ledger.release(node.pages)
        if node.parent is not None:
            node.parent.children -= 1
            self._offer(node.parent)


def _evictable(node: Node) -> bool:
    return node.users == 0 and node.children == 0
