"""Collects what the engine tells, on two threads.

The engine's thread leaves events in an outbox and reads the pool now and then. The server's loop
takes them out, keeps the state that endpoints show, and sends frames to watchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tangram.serve.bodies.body import Json
from tangram.types import Int32, Int64, UInt8
from tangram.watch import News, PageState, PoolReading, Readings, SequenceChange, StepDone
from tangram.web.requests import Requests, ShownCompletion
from tangram.web.watchers import frame

MOST_STEPS = 400
# The pool is read at most ten times a second, and for at most a hundredth of the time.
READ_EVERY_S, READING_SHARE = 0.1, 0.01
# Frames are sent so often; without watchers state is brought up to date so often.
FLUSH_S, IDLE_FLUSH_S = 0.05, 1.0
# Many watchers are sent frames less often: sending to one takes about a sixtieth of this.
FLUSH_A_WATCHER_S = 0.008
# An endpoint that shows a running request waits so long for a reading; then readings go on a while.
FRESH_S, WANTED_S = 0.25, 2.0
# More changed pages than these are not listed: a watcher reads the pool again.
MOST_CHANGES = 4096
# Of more running requests than these a reading tells of those that were not told of for longest.
MOST_TOLD = 32
UInt16 = np.ndarray[tuple[int], np.dtype[np.uint16]]


@dataclass(eq=False)
class Pool:
    """Every page now. `owners` uint16 number conversations: that of whoever held a page last.

    Conversations are numbered from 1; 0 is the owner of no page, and of pages that were never read
    while a conversation held it.
    """

    states: UInt8
    owners: UInt16
    promised: int = 0
    host_used: int = 0
    host_total: int = 0

    @property
    def counts(self) -> Json:
        """What is of no particular page."""
        return {"host_used": self.host_used, "promised": self.promised}

    def take(self, reading: PoolReading, numbers: Int32) -> Int64:
        """Enter a reading whose sequences are of conversations `numbers`.

        Returns the changes [n, 3]: page, state, owner.
        """
        owners = self.owners.copy()
        held = reading.holders >= 0
        owners[held] = numbers[reading.holders[held]]
        owners[reading.states == PageState.FREE] = 0
        changed = np.flatnonzero((owners != self.owners) | (reading.states != self.states))
        self.states, self.owners = reading.states, owners
        self.promised, self.host_used = reading.promised, reading.host_used
        self.host_total = reading.host_total
        return np.stack([changed, self.states[changed], self.owners[changed]], axis=1)


@dataclass
class _Outbox:
    """What the engine's thread leaves for the loop."""

    steps: list[StepDone] = field(default_factory=list)
    changes: list[SequenceChange] = field(default_factory=list)
    pool: PoolReading | None = None


@dataclass(frozen=True, eq=False)
class ToldWatcher:
    """Whoever is told news: requests of the key of digest `client`, and what is of nobody.

    `client` is None where there are no keys. `send` is given server-sent events, nothing at the
    end, and never waits.
    """

    client: bytes | None
    send: Callable[[bytes], None]


class Collector:
    """The observer of one engine, whose pool has `pages`. `begin_s` is zero of all times sent."""

    def __init__(self, pages: int) -> None:
        self.begin_s = time.monotonic()
        self.requests = Requests()
        self.pool = Pool(np.zeros(pages, np.uint8), np.zeros(pages, np.uint16))
        self.steps: deque[Json] = deque(maxlen=MOST_STEPS)
        self.watchers: set[ToldWatcher] = set()
        self._outbox, self._lock = _Outbox(), threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited = False  # a flush is on its way
        self._flushed_s = self._taken_s = 0.0
        self._next_reading_s = self._wanted_until_s = 0.0
        self._stale = self._ending = False
        self._fresh = asyncio.Event()

    # -- on the engine's thread --------------------------------------------------------------------

    def observe(self, news: News, readings: Readings) -> None:
        """See `Observer`."""
        self._stale |= news.step is not None or bool(news.changes)
        pool = self._read_pool(news.idle, readings)
        with self._lock:
            if news.step is not None:
                self._outbox.steps.append(news.step)
                del self._outbox.steps[:-MOST_STEPS]
            self._outbox.changes.extend(news.changes)
            self._outbox.pool = pool or self._outbox.pool
        self._call_for_flush()

    def _read_pool(self, idle: bool, readings: Readings) -> PoolReading | None:
        """A reading if something has changed and it is time; always before a pause."""
        now_s = time.monotonic()
        due = now_s >= self._next_reading_s and (bool(self.watchers) or self._is_wanted)
        if not self._stale or not (idle or due):
            return None
        reading = readings.pool()
        self._stale = False
        cost_s = time.monotonic() - now_s
        self._next_reading_s = now_s + max(READ_EVERY_S, cost_s / READING_SHARE)
        return reading

    def _call_for_flush(self) -> None:
        if not self._awaited and self._loop is not None:
            self._awaited = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._flush_soon)

    # -- on the server's loop ----------------------------------------------------------------------

    def start(self) -> None:
        """The server's loop runs."""
        self._loop = asyncio.get_running_loop()

    def drain(self) -> None:
        """End all streams. Any thread may call it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._close_watchers)

    def _close_watchers(self) -> None:
        self._ending = True
        for watcher in self.watchers:
            watcher.send(b"")

    def enter(self, watcher: ToldWatcher) -> None:
        """Begin a stream: first a `hello`, then what comes."""
        self.flush()
        told = {"at": time.monotonic() - self.begin_s, "last_steps": list(self.steps)}
        watcher.send(frame("hello", told))
        self.watchers.add(watcher)
        if self._ending:
            watcher.send(b"")

    async def freshen(self) -> None:
        """Bring the state up to date; waits a little for a reading if the last is old.

        Where sequences run, that is by its age; elsewhere, if anything has happened since.
        """
        self.flush()
        now_s = time.monotonic()
        self._wanted_until_s = now_s + WANTED_S
        old = now_s - self._taken_s > READ_EVERY_S if self.requests.running else self._stale
        if old:
            self._fresh.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_S):
                    await self._fresh.wait()
            self.flush()

    def _flush_soon(self) -> None:
        """Flush when it is time; called once for many events."""
        wait_s = self._flushed_s + self._flush_every_s - time.monotonic()
        if self._loop is not None and wait_s > 0:
            self._loop.call_later(wait_s, self.flush)
        else:
            self.flush()

    @property
    def _flush_every_s(self) -> float:
        if self.watchers or self._is_wanted:
            return max(FLUSH_S, FLUSH_A_WATCHER_S * len(self.watchers))
        return IDLE_FLUSH_S

    @property
    def _is_wanted(self) -> bool:
        return time.monotonic() < self._wanted_until_s

    def flush(self) -> None:
        """Take what the engine has left, and send it."""
        self._awaited = False
        self._flushed_s = time.monotonic()
        with self._lock:
            outbox, self._outbox = self._outbox, _Outbox()
        frames = [self._take_step(step) for step in outbox.steps]
        changed = dict.fromkeys(
            shown for each in outbox.changes if (shown := self.requests.take(each)) is not None
        )
        if outbox.pool is not None:
            frames += self._take_pool(outbox.pool, changed)
            self._taken_s = self._flushed_s
            self._fresh.set()
        self._send(frames, changed)

    def _take_step(self, step: StepDone) -> bytes:
        told = {
            "n": step.number,
            "at": round(step.at_s - self.begin_s, 6),
            "seconds": round(step.seconds, 6),
            "decode_rows": step.decode_rows,
            "decode_tokens": step.decode_tokens,
            "chunks": step.chunks,
            "tail_tokens": step.tail_tokens,
            "moves": step.moves,
            "drafted": step.drafted,
            "accepted": step.accepted,
        }
        self.steps.append(told)
        return frame("step", told) if self.watchers else b""

    def _take_pool(self, reading: PoolReading, changed: dict[ShownCompletion, None]) -> list[bytes]:
        numbers = np.zeros(max(1, len(reading.sequences)), np.int32)
        running = list[ShownCompletion]()
        for at, sequence in enumerate(reading.sequences):
            shown = self.requests.read(sequence)
            if shown is not None:
                numbers[at] = shown.conversation
                running += [] if shown.ended else [shown]
        running.sort(key=lambda shown: shown.told_s)
        changed |= dict.fromkeys(running[:MOST_TOLD])
        counts = self.pool.counts
        changes = self.pool.take(reading, numbers)
        if len(changes) > MOST_CHANGES:
            return [frame("lost", {})]
        if not len(changes) and counts == self.pool.counts:
            return []
        told = [[page, state, owner or None] for page, state, owner in changes.tolist()]
        return [frame("pool", {"changes": told, **self.pool.counts})]

    def _send(self, frames: Sequence[bytes], changed: dict[ShownCompletion, None]) -> None:
        if not self.watchers:
            return
        shared, clients = b"".join(frames), {watcher.client for watcher in self.watchers}
        theirs = {client: self._frames_for(changed, client) for client in clients}
        for shown in changed:
            shown.told_s = self._flushed_s
        for watcher in self.watchers:
            if sent := shared + theirs[watcher.client]:
                watcher.send(sent)

    def _frames_for(self, changed: dict[ShownCompletion, None], client: bytes | None) -> bytes:
        return b"".join(
            frame("request", describe_progress(shown))
            for shown in changed
            if shown.announcement.client == client
        )


def describe_progress(shown: ShownCompletion) -> Json:
    """A completion in numbers."""
    reading, usage = shown.reading, shown.reading.usage
    return {
        "id": shown.announcement.answer_id,
        "request_id": shown.announcement.request_id,
        "index": shown.choice,
        "conversation": shown.conversation,
        "state": shown.state.value,
        "tokens": len(reading.tokens),
        "sealed_chunks": reading.sealed_chunks,
        "cached_tokens": usage.cached_tokens,
        "kv_bytes": usage.kv_bytes,
        "kv_bytes_uncompressed": usage.kv_bytes_uncompressed,
        "accepted": None if usage.drafted is None else usage.drafted.accepted,
        "rejected": None if usage.drafted is None else usage.drafted.rejected,
    }
