"""Forgetting what may not be sound: a sequence whose logits are NaN has unsound state somewhere,
nobody knows where.

So its whole chain goes, from its first link on: what it computed, and what it found there, of which
one link may have been broken by whoever came before and never looked at a logit. With it goes
whatever descends from those links, in host memory too, because it was computed over them. Nothing
else can be touched, since state depends on the own chain alone. The price of going too far is to
compute a prefix once more.
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
    """Keys of links that may be unsound, those of them that are on the device, and the slots that
    stand on these.
    """

    keys: set[bytes]
    nodes: list[Node]
    slots: list[int]

    def pages(self, cache: CacheManager) -> Int32:
        """[n] all pages that the links and the sequences hold, those that were never
        published too.
        """
        held = [node.pages for node in self.nodes]
        for seq in map(cache.sequences.__getitem__, self.slots):
            held += [*seq.spans, *seq.window_spans, *seq.raw_pages]
        return np.unique(np.concatenate(held)) if held else np.zeros(0, np.int32)


def suspects(cache: CacheManager, keys: ChunkKeys, tokens: Int64) -> Suspects:
    """All that begins as the sequence of `keys` and `tokens` does and may have come of
    its state.
    """
    layout = keys.retention.layout
    found = {raw_key(keys.after(0, tokens), tokens[: layout.page_tokens])}
    if len(tokens) >= layout.chunk_tokens:
        found.add(keys.after(1, tokens))
    nodes = []
    for node in cache.prefix.nodes.values():  # parents come before children
        if node.key in found or (node.parent is not None and node.parent.key in found):
            found.add(node.key)
            nodes.append(node)
    slots = [
        seq.slot
        for seq in cache.sequences.values()
        if any(links and links[0].key in found for links in (seq.chunk_nodes, seq.raw_nodes))
    ]
    return Suspects(found, nodes, slots)


def purge(cache: CacheManager, found: Suspects) -> None:
    """Forget the links, on the device and in host memory. No sequence may stand on them
    any more.
    """
    for node in reversed(found.nodes):
        cache.prefix.remove(node)
    cache.host.forget(found.keys)
