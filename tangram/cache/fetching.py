"""Chunks of a prompt that only the disk has come to host memory before the prompt is admitted."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tangram.cache.disk import Fetch, WantedLink
from tangram.cache.keys import ChunkKeys
from tangram.cache.manager import CacheManager
from tangram.types import Int64, LinkName

# No prompt waits longer: a disk that reads 100 MB in a second has given a GiB, and what takes
# longer than that is computed.
MOST_FETCH_S = 10.0


def plan_fetch(cache: CacheManager, keys: ChunkKeys, tokens: Int64) -> Fetch | None:
    """What is to be read because only the disk has it of `tokens` int64 [n]; None if nothing is.

    No more is read than host memory holds, together with what it has of the chain already.
    """
    layout, disk = keys.retention.layout, cache.disk
    most = (len(tokens) - 1) // layout.chunk_tokens
    if disk is None or not cache.prefix_caching or not most:
        return None
    known = cache.prefix.longest(keys, tokens).chunks
    if len(known) == most or disk.hangs:
        return None
    root, store = keys.after(1, tokens), disk.store

    def knows(key: bytes) -> bool:
        return cache.prefix.knows(key) or store.has(LinkName(root, key))

    on_device = sum(cache.prefix.find(key) is not None for key in known)
    fitting = on_device + cache.host.total // layout.span_pages
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
    return Fetch(chain.keys, wanted, time.monotonic() + MOST_FETCH_S) if wanted else None


def begin_reads(cache: CacheManager, fetches: Iterable[Fetch]) -> None:
    """Begin to read for `fetches`, in order, while host memory would hold all that is being read.

    So little of memory is taken by what nobody has yet. One that is alone always begins.
    """
    if (disk := cache.disk) is None:
        return
    for fetch in fetches:
        if fetch.begun:
            continue
        wanted = [link for link in fetch.links if not cache.prefix.knows(link.name.key)]
        reading = disk.reading_pages
        if reading and reading + disk.count_new_pages(wanted) > cache.host.total:
            return
        disk.begin(fetch, wanted)


def is_over(cache: CacheManager, fetch: Fetch) -> bool:
    """Whether every link is known or has been read, or `fetch` has taken too long."""
    return time.monotonic() > fetch.deadline_s or all(
        cache.prefix.knows(link.name.key) or fetch.has_read(link.name) for link in fetch.links
    )


def end_fetch(cache: CacheManager, fetch: Fetch, keys: ChunkKeys, tokens: Int64) -> None:
    """Give host memory what `fetch` has found by now, as far as `tokens` int64 [n] can use it.

    The links of the chain that host memory has stay there meanwhile.
    """
    if (disk := cache.disk) is None:
        return
    found = disk.take(fetch)
    usable = cache.prefix.longest(keys, tokens, lambda key: cache.prefix.knows(key) or key in found)
    used = set(usable.keys)
    with cache.host.holding(fetch.chain):
        for link in fetch.links:
            key = link.name.key
            if key in used and not cache.prefix.knows(key):
                disk.hits += cache.host.fill(key, found[key], link.parent)
    cache.host.mark(fetch.chain)  # the beginning came in first
