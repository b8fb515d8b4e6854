"""What the web page shows, in the engine's process: its answers, and news for its watchers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
from msgspec.json import encode as write

from tangram.serve.bodies.body import Json
from tangram.serve.transport.api_errors import ApiError
from tangram.types import UInt8
from tangram.watch import CacheShape, RetentionShape
from tangram.web.collector import Collector, ToldWatcher, UInt16
from tangram.web.details import Details, encode
from tangram.web.history import STEP_S, History
from tangram.web.questions import (
    Announcement,
    AnswerTimes,
    HistoryQuestion,
    KeptQuestion,
    ModelQuestion,
    PoolQuestion,
    Question,
    RequestQuestion,
)
from tangram.web.requests import ShownCompletion

if TYPE_CHECKING:
    from tangram.engine.loop import Engine

MOST_WATCHERS = 64


class WebDesk:
    """Tells the web page of an `engine` that serves `model`. For the event loop of `start`."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._collector = Collector(engine.stats().pages_total)
        self._watched = engine.watch(self._collector)
        self._collector.pool.host_total = self._watched.shape.host_pages_total
        self._details = Details(self._watched, engine.codec, self._collector.begin_s)
        self._history = History(self._collector.begin_s)
        self._sampling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The event loop runs."""
        self._collector.start()
        self._sampling = asyncio.create_task(self._sample())

    def drain(self) -> None:
        """End all streams."""
        self._collector.drain()

    def close(self) -> None:
        """Tell nothing more."""
        self._collector.drain()
        if self._sampling is not None:
            self._sampling.cancel()

    async def _sample(self) -> None:
        while True:
            stats = await asyncio.to_thread(self._engine.stats)
            self._history.sample(stats, time.monotonic())
            await asyncio.sleep(STEP_S)

    def announce(self, announcement: Announcement) -> None:
        """The engine may soon tell of sequences of this request."""
        self._collector.requests.announce(announcement)

    def count(self, times: AnswerTimes) -> None:
        """A request has ended."""
        self._history.count(times)

    def watch(self, watcher: ToldWatcher) -> None:
        """Begin to tell `watcher` news. Raises `ApiError` if too many watch."""
        if len(self._collector.watchers) >= MOST_WATCHERS:
            raise ApiError(
                429, f"{MOST_WATCHERS} clients watch already: close one of them, or wait"
            )
        self._collector.enter(watcher)

    def unwatch(self, watcher: ToldWatcher) -> None:
        """Tell `watcher` nothing more."""
        self._collector.watchers.discard(watcher)

    async def answer(self, question: Question) -> bytes:
        """The answer as JSON. Raises `ApiError`."""
        match question:
            case ModelQuestion():
                return write(describe_model(self._model, self._watched.shape))
            case RequestQuestion(id, index, tokens_from, client):
                await self._collector.freshen()
                shown = self._find(id, index, client)
                told = await asyncio.to_thread(self._details.describe, shown, tokens_from)
                return await asyncio.to_thread(write, told)
            case KeptQuestion(id, index, chunk, client):
                self._collector.flush()
                return write(self._details.describe_kept(self._find(id, index, client), chunk))
            case PoolQuestion(client):
                await self._collector.freshen()
                pool, told = self._collector.pool, describe_pool(self._collector, client)
                return await asyncio.to_thread(_write_pool, pool.states, pool.owners, told)
            case HistoryQuestion(seconds):
                return write(self._history.read(seconds))

    def _find(self, name: str, choice: int, client: bytes | None) -> ShownCompletion:
        """Raises `ApiError` 404, the same for requests of others and for those that never were."""
        shown = self._collector.requests.find(name, choice)
        if shown is None or shown.announcement.client != client:
            raise ApiError(
                404,
                "no such request of this key: it has not begun, or was forgotten since",
                param="id",
                code="no_such_request",
            )
        return shown


def describe_model(model: str, shape: CacheShape) -> Json:
    """What never changes while the server runs."""
    return {
        "model": model,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "chunk_tokens": shape.chunk_tokens,
        "page_tokens": shape.page_tokens,
        "page_bytes": shape.page_bytes,
        "kv_token_bytes": shape.kv_token_bytes,
        "full_layers": [at for at, window in enumerate(shape.windows) if window is None],
        "windows": list(shape.windows),
        "retentions": [
            _describe_retention(entry, default=not at) for at, entry in enumerate(shape.retentions)
        ],
        "speculation": None
        if shape.drafts_by is None
        else {"method": shape.drafts_by, "num_speculative_tokens": shape.most_drafted},
        "pages_total": shape.pages_total,
        "host_pages_total": shape.host_pages_total,
        "recorded": shape.recorded,
    }


def _describe_retention(entry: RetentionShape, *, default: bool) -> Json:
    return {
        "kv_retention": entry.kv_retention,
        "scorer": entry.scorer,
        "budgets": entry.budgets.tolist(),
        "drafted": entry.drafted,
        "default": default,
    }


def describe_pool(collector: Collector, client: bytes | None) -> Json:
    """The conversations that have pages, those of other clients without id, and all counts."""
    pool, newest = collector.pool, dict[int, ShownCompletion]()
    for shown in collector.requests.newest:
        newest.setdefault(shown.conversation, shown)
    owning = np.flatnonzero(np.bincount(pool.owners))
    return {
        "pages_total": len(pool.states),
        **pool.counts,
        "host_total": pool.host_total,
        "conversations": [
            _describe_conversation(number, newest.get(number), client)
            for number in owning.tolist()
            if number
        ],
    }


def _describe_conversation(
    number: int, shown: ShownCompletion | None, client: bytes | None
) -> Json:
    told = None if shown is None or shown.announcement.client != client else shown.announcement
    return {
        "number": number,
        "id": None if told is None else told.answer_id,
        "request_id": None if told is None else told.request_id,
        "tokens": 0 if shown is None else len(shown.reading.tokens),
    }


def _write_pool(states: UInt8, owners: UInt16, told: Json) -> bytes:
    """Millions of pages take a while: call it on a thread; no array changes."""
    return write(told | {"states": encode(states), "owners": encode(owners)})
