"""Turns what an engine tells of its prefix cache into KV events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tangram.kv_events.events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    hash_of,
)
from tangram.watch import (
    ChunkPlace,
    ChunkStored,
    LinkChange,
    LinkDropped,
    LinkOffloaded,
    News,
    Observer,
    Readings,
    Watched,
)


class KvEventStream:
    """An observer by `watch` of an engine; it hands KV events to `send`. A chunk is a block.

    Told is of chunks that any request can share which names no ratio, no scorer and no salt. A
    router knows the tokens of a prompt and none of these, so of others it would expect too much.
    """

    def __init__(
        self, watch: Callable[[Observer], Watched], send: Callable[[Sequence[KvEvent]], None]
    ) -> None:
        self._send = send
        self._known = {ChunkPlace.DEVICE: set[bytes](), ChunkPlace.HOST: set[bytes]()}
        shape = watch(self).shape
        self._chunk_tokens, self._default = shape.chunk_tokens, shape.retentions[0]
        send([AllBlocksCleared()])  # what an earlier process had at this address is gone

    def observe(self, news: News, readings: Readings) -> None:
        """See `Observer`."""
        events = [event for link in news.links if (event := self._translate(link)) is not None]
        if events:
            self._send(events)

    def _translate(self, link: LinkChange) -> KvEvent | None:
        if isinstance(link, ChunkStored):
            return self._store(link) if self._is_shared(link) else None
        place = ChunkPlace.HOST if isinstance(link, LinkOffloaded) else link.place
        known, medium = self._known[place], GPU if place is ChunkPlace.DEVICE else CPU
        if isinstance(link, LinkDropped):
            if link.key not in known:
                return None
            known.remove(link.key)
            return BlockRemoved([hash_of(link.key)], medium)
        if link.key not in self._known[ChunkPlace.DEVICE]:
            return None
        known.add(link.key)
        return BlockStored([hash_of(link.key)], None, [], self._chunk_tokens, None, medium, None)

    def _store(self, chunk: ChunkStored) -> BlockStored:
        self._known[ChunkPlace.DEVICE].add(chunk.key)
        return BlockStored(
            [hash_of(chunk.key)],
            None if chunk.parent is None else hash_of(chunk.parent),
            chunk.tokens.tolist(),
            self._chunk_tokens,
            None,
            GPU,
            None,
        )

    def _is_shared(self, chunk: ChunkStored) -> bool:
        default = self._default
        return not chunk.salted and (chunk.kv_retention, chunk.scorer) == (
            default.kv_retention,
            default.scorer,
        )
