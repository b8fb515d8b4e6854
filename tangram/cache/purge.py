"""Forget links that may be unsound after a sequence had NaN logits.

Such a sequence has unsound KV state, but which link holds it is unknown. So its whole chain is
forgotten, from the first link on: the links that it computed and the links that it found cached. A
cached link may have been broken by a sequence whose logits nobody sampled. Links that descend from
these are forgotten too, in host memory as well, because they were computed over them. Nothing else
can be affected, since state depends on the own chain alone. A sound prefix that is forgotten is
computed once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.cache.keys import ChunkKeys, raw_key
from tangram.cache.manager import CacheManager
from tangram.cache.prefix import Node
from tangram.types import Int32, Int64


@dataclass(frozen=True)
class Suspects:
    """Links that may be unsound, and the sequences that use them.

    `keys` are the keys of the links, `nodes` those that are on the device, and `slots` the
    sequences that use these nodes. Links on disk are those of chains that begin with `root`.
    """

    root: bytes | None
    keys: set[bytes]
    nodes: list[Node]
    slots: list[int]

    def pages(self, cache: CacheManager) -> Int32:
        """[n]: all pages that the links and the sequences hold, unpublished ones included."""
        held = [node.pages for node in self.nodes]
        for seq in map(cache.sequences.__getitem__, self.slots):
            held += [*seq.spans, *seq.window_spans, *seq.raw_pages, *seq.snapshots.values()]
        return np.unique(np.concatenate(held)) if held else np.zeros(0, np.int32)


def suspects(cache: CacheManager, keys: ChunkKeys, tokens: Int64) -> Suspects:
    """All links and sequences that may depend on the sequence of `keys` and `tokens` int64 [n].

    These are those that begin with the same tokens.
    """
    layout = keys.retention.layout
    found = {raw_key(keys.after(0, tokens), tokens[: layout.page_tokens])}
    root = keys.after(1, tokens) if len(tokens) >= layout.chunk_tokens else None
    if root is not None:
        found.add(root)
    nodes = []
    for node in cache.prefix.nodes.values():  # parents come before children
        if node.key in found or (node.parent is not None and node.parent.key in found):
            found.add(node.key)
            nodes.append(node)
    slots = [
        seq.slot
        for seq in cache.sequences.values()
        if any(
            links and links[0].key in found
            for links in (seq.chunk_nodes, seq.open_nodes, seq.raw_nodes)
        )
    ]
    return Suspects(root, found, nodes, slots)


def purge(cache: CacheManager, found: Suspects) -> None:
    """Forget the links, wherever they are. No sequence may still use them."""
    for node in reversed(found.nodes):
        cache.prefix.remove(node)
    cache.host.forget(found.keys)
    if cache.disk is not None and found.root is not None:
        cache.host.drop_saves(found.root)
        cache.disk.forget(found.root)
