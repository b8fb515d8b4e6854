"""Chunks of a prompt that only the disk has come to host memory before the prompt is admitted."""

from __future__ import annotations

from tangram.cache.disk import Fetch, WantedLink
from tangram.cache.keys import ChunkKeys
from tangram.cache.manager import CacheManager
from tangram.types import Int64, LinkName


def begin_fetch(cache: CacheManager, keys: ChunkKeys, tokens: Int64) -> Fetch | None:
    """Begin to read what only the disk has of `tokens` int64 [n]; None if that is nothing.

    No more is read than host memory holds.
    """
    layout, disk = keys.retention.layout, cache.disk
    if disk is None or not (most := (len(tokens) - 1) // layout.chunk_tokens):
        return None
    known = len(cache.prefix.longest(keys, tokens).chunks)
    if known == most:
        return None
    root, store = keys.after(1, tokens), disk.store

    def knows(key: bytes) -> bool:
        return cache.prefix.knows(key) or store.has(LinkName(root, key))

    fitting = known + cache.host.total // layout.span_pages
    chain = cache.prefix.longest(keys, tokens[: fitting * layout.chunk_tokens + 1], knows)
    disk.misses += len(chain.chunks) < min(most, fitting)
    links = [
        *zip(chain.chunks, [None, *chain.chunks], strict=False),
        *zip(chain.windows, chain.chunks[len(chain.chunks) - len(chain.windows) :], strict=True),
    ]
    sizes = [layout.full_span_pages] * len(chain.chunks)
    sizes += [layout.window_span_pages] * len(chain.windows)
    wanted = [
        WantedLink(LinkName(root, key), pages, parent)
        for (key, parent), pages in zip(links, sizes, strict=True)
        if not cache.prefix.knows(key)
    ]
    return disk.fetch(wanted) if wanted else None


def end_fetch(cache: CacheManager, fetch: Fetch) -> None:
    """Give host memory what `fetch`, which is done, has found."""
    if cache.disk is None:
        return
    found = cache.disk.take(fetch)
    with cache.host.holding([link.name.key for link in fetch.links]):
        for link, words in zip(fetch.links, found, strict=True):
            if words is not None and not cache.prefix.knows(link.name.key):
                cache.host.fill(link.name.key, words, link.parent)
