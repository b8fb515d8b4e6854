"""What an engine tells those who watch it: events of steps and sequences, readings of its cache.

`engine/watching.py` emits, on the engine's thread. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tangram.types import Int32, Int64, LostPrefix, UInt8, Usage

Bool = npt.NDArray[np.bool_]


class SequenceState(Enum):
    """Where a sequence is on its way.

    A preempted sequence waits again. `FIRST_TOKEN` is a moment of a running sequence.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FIRST_TOKEN = "first token"
    ENDED = "ended"


class PageState(IntEnum):
    """What a page of the pool holds. A promise is of no particular page, so it is only counted."""

    FREE = 0
    RAW = 2
    SEALED = 3
    SHARED = 4
    CACHED = 5


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step, which ended at `at_s` of the monotonic clock after `seconds`.

    `decode_tokens` are those of its `decode_rows`, drafts included. `chunks` were sealed whole,
    `tail_tokens` end prompts. `moves` are pages copied to or from host memory.
    """

    number: int
    at_s: float
    seconds: float
    decode_rows: int
    decode_tokens: int
    chunks: int
    tail_tokens: int
    moves: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class SequenceReading:
    """Completion `index` of an engine's request.

    `tokens` int64 [n] are prompt and answer so far, `chunk_keys` the names of its sealed chunks.
    The first `computed_tokens` have KV entries; those behind the sealed chunks are the raw tail. A
    reading during a step counts what the step computes. It left the queue first at `admitted_s`;
    its prompt has `lost` what was not in the prefix cache any more.
    """

    request_id: str
    index: int
    kv_retention: float
    scorer: str | None
    chunk_tokens: int
    tokens: Int64
    chunk_keys: Sequence[bytes]
    sealed_chunks: int
    computed_tokens: int
    usage: Usage
    admitted_s: float | None
    lost: LostPrefix | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SequenceChange:
    """A sequence has reached `state` at `at_s` of the monotonic clock."""

    state: SequenceState
    at_s: float
    reading: SequenceReading


@dataclass(frozen=True, slots=True, eq=False)
class PoolReading:
    """The pages of the pool between two steps.

    `states` uint8 [pages] are `PageState`s. `holders` int32 [pages] number the sequences in
    `sequences` that hold a page, the latest of several; -1 is nobody. `promised` of the free and
    cached pages are reserved.
    """

    states: UInt8
    holders: Int32
    sequences: Sequence[SequenceReading]
    promised: int
    host_used: int
    host_total: int


@dataclass(frozen=True, slots=True)
class RetentionShape:
    """One way to keep entries that is served: `budgets` int32 [L, H] are those kept of a chunk.

    `scorer` is None where nothing is scored. `drafted` says whether the engine may draft for it.
    """

    kv_retention: float
    scorer: str | None
    budgets: Int32
    drafted: bool


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What never changes while an engine serves. The first of `retentions` is the default.

    Only their list grows, by those that are derived for requests. `recorded` says whether kept
    positions are noted.
    """

    layers: int
    kv_heads: int
    chunk_tokens: int
    page_tokens: int
    page_bytes: int
    kv_token_bytes: int
    windows: Sequence[int | None]
    retentions: Sequence[RetentionShape]
    drafts_by: str | None
    most_drafted: int
    pages_total: int
    host_pages_total: int
    recorded: bool


class ChunkPlace(Enum):
    """Where the entries of a sealed chunk are."""

    DEVICE = "device"
    HOST = "host"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """Where a sealed chunk is now, and how many sequences read it."""

    place: ChunkPlace
    users: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkStored:
    """A sealed chunk has come to the device's prefix cache: computed, or back from host memory.

    `tokens` int64 [C] are its own. They follow the chunk of key `parent`; None is the beginning.
    Requests with a salt share chunks with nobody else: `salted` says whether it is one of these.
    """

    key: bytes
    parent: bytes | None
    tokens: Int64
    kv_retention: float
    scorer: str | None
    salted: bool


@dataclass(frozen=True, slots=True)
class LinkOffloaded:
    """Host memory has a copy of the link `key` now: a chunk, or its window part."""

    key: bytes


@dataclass(frozen=True, slots=True)
class LinkDropped:
    """The link `key` is gone from `place`: a chunk, or in host memory also a window part."""

    key: bytes
    place: ChunkPlace


LinkChange = ChunkStored | LinkOffloaded | LinkDropped


@dataclass(frozen=True, slots=True, eq=False)
class KeptPositions:
    """Which entries of a sealed chunk each head chose by score.

    `bits` uint8 [ceil(L · H · C / 8)] are those of bool [L, H, C], little-endian. The other entries
    are gone. With drafts from the own cache they stand behind these, and drafts leave them out.
    """

    bits: UInt8
    layers: int
    heads: int
    tokens: int

    @property
    def chosen(self) -> Bool:
        """bool [L, H, C]."""
        count = self.layers * self.heads * self.tokens
        flat = np.unpackbits(self.bits, count=count, bitorder="little").astype(np.bool_)
        return flat.reshape(self.layers, self.heads, self.tokens)


@dataclass(frozen=True, slots=True)
class News:
    """What has happened: `step` is done, sequences and links of the prefix cache have changed.

    Changes are in their order. Sequences that a step admits are told of before it runs; then `step`
    is None. `idle` engines have nothing to do.
    """

    step: StepDone | None
    changes: Sequence[SequenceChange]
    idle: bool
    links: Sequence[LinkChange] = ()


class Readings(Protocol):
    """What an observer may read while it is told something."""

    def pool(self) -> PoolReading:
        """All pages, and the sequences that hold or await some."""


class Watched(Protocol):
    """What may be asked of a watched engine at any time, from any thread."""

    @property
    def shape(self) -> CacheShape:
        """What never changes."""

    def uses(self, keys: Sequence[bytes]) -> Sequence[ChunkUse]:
        """Where the chunks of `keys` are now."""

    def find_kept(self, key: bytes) -> KeptPositions | None:
        """What was kept of the chunk `key`; None if it is not known."""


class Observer(Protocol):
    """Is told on the engine's thread, which waits: it must be quick.

    One that raises is told nothing more.
    """

    def observe(self, news: News, readings: Readings) -> None:
        """Take in `news`."""
