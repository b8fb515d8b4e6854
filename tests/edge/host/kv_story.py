"""A few changes of a prefix cache, and the KV events that are published of them.

`python -m tests.edge.host.kv_story` writes them to a file for vLLM's own decoder
(`tests/fixtures/kv_events/make_fixture.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from tangram.cache.keys import list_keys
from tangram.kv_events.events import EventBatch, KvEvent
from tangram.kv_events.stream import KvEventStream
from tangram.watch import ChunkPlace, ChunkStored, LinkChange, LinkDropped, LinkOffloaded, News

STREAM = Path(__file__).parents[2] / "fixtures" / "kv_events" / "stream.json"
C = 8
TOKENS = np.arange(2 * C + 1, dtype=np.int64) * 7919 % 150_000
KEYS = list_keys("profile", "", C, TOKENS)
PRIVATE = list_keys("profile", "salt", C, TOKENS)


def store_chunk(
    chunk: int, *, keys: Sequence[bytes] = KEYS, ratio: float = 0.25, salted: bool = False
) -> ChunkStored:
    parent = keys[chunk - 1] if chunk else None
    own = TOKENS[chunk * C : (chunk + 1) * C]
    return ChunkStored(keys[chunk], parent, own, ratio, "keydiff", salted)


STORY: Sequence[Sequence[LinkChange]] = (
    (store_chunk(0), store_chunk(1)),
    (store_chunk(0, keys=PRIVATE, salted=True),),  # nothing is told of it
    (LinkOffloaded(KEYS[1]), LinkDropped(KEYS[1], ChunkPlace.DEVICE)),
    (LinkOffloaded(b"the window part of a chunk"),),  # nor of this
    (store_chunk(1), LinkDropped(KEYS[1], ChunkPlace.HOST)),
    (LinkDropped(KEYS[1], ChunkPlace.DEVICE), LinkDropped(KEYS[0], ChunkPlace.DEVICE)),
    (LinkDropped(PRIVATE[0], ChunkPlace.DEVICE),),
)


class Teller:
    """An engine whose prefix cache changes as it is told to. Its default ρ is 0.25."""

    def watch(self, observer: Any) -> Any:
        self.observer = observer
        default = SimpleNamespace(kv_retention=0.25, scorer="keydiff")
        return SimpleNamespace(shape=SimpleNamespace(chunk_tokens=C, retentions=[default]))

    def tell(self, links: Sequence[LinkChange]) -> None:
        self.observer.observe(News(None, (), idle=False, links=links), None)


def batches_of(story: Sequence[Sequence[LinkChange]]) -> list[Sequence[KvEvent]]:
    """What is published of `story`, batch by batch."""
    engine, sent = Teller(), list[Sequence[KvEvent]]()
    KvEventStream(engine.watch, sent.append)
    for links in story:
        engine.tell(links)
    return sent


def payloads_of(batches: Sequence[Sequence[KvEvent]]) -> list[str]:
    """Encoded, in hexadecimal, each one second after the one before."""
    return [
        msgspec.msgpack.encode(EventBatch(float(number), list(events), 0)).hex()
        for number, events in enumerate(batches)
    ]


if __name__ == "__main__":
    STREAM.write_text(json.dumps({"payloads": payloads_of(batches_of(STORY))}, indent=1) + "\n")
