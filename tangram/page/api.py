"""The page as an extension of the server: its files, and the endpoints below /v1/kv."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.metrics import EngineStats
from tangram.page.access import Access
from tangram.page.collector import Collector
from tangram.page.details import Details, encode
from tangram.page.files import FILES
from tangram.page.history import MOST_S, STEP_S, History
from tangram.page.requests import Announcement, ShownCompletion
from tangram.page.watchers import Watcher
from tangram.serve.api_errors import ApiError
from tangram.serve.body import Json
from tangram.serve.bridge import Codec, Job
from tangram.serve.record import Record, record_of
from tangram.watch import CacheShape, Observer, RetentionShape, Watched

MOST_WATCHERS = 64
_Place = Annotated[int, Query(ge=0, le=1_000_000)]


class WatchedEngine(Protocol):
    """The part of `tangram.engine.loop.Engine` that the page sees."""

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""
        ...

    def watch(self, observer: Observer) -> Watched:
        """Tell `observer` of every step."""
        ...

    def stats(self) -> EngineStats:
        """The engine's statistics between two steps."""
        ...


class CachePage:
    """The page of an `engine` that serves `model`; an `Extension` of its server."""

    def __init__(self, engine: WatchedEngine, model: str, access: Access) -> None:
        self._engine, self._model, self._access = engine, model, access
        self._collector = Collector(engine.stats().pages_total)
        self._watched = engine.watch(self._collector)
        self._collector.pool.host_total = self._watched.shape.host_pages_total
        self._details = Details(self._watched, engine.codec, self._collector.begin_s)
        self._history = History(self._collector.begin_s)
        self._sampling: asyncio.Task[None] | None = None

    # -- as an extension ---------------------------------------------------------------------------

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """See `Extension`."""
        self._access = self._access.on(locked=locked)
        FILES.mount(app, self._check)
        self._add_endpoints(app)
        self._add_stream(app)

    def is_open(self, path: bytes) -> bool:
        """See `Extension`: files hold no data."""
        return FILES.has(path)

    def start(self) -> None:
        """See `Extension`."""
        self._collector.start()
        self._sampling = asyncio.create_task(self._sample())

    def announce(self, job: Job) -> None:
        """See `Extension`."""
        if job.record is None:
            return  # nobody could ask for it
        request_id, client = job.record.request_id, job.record.key_digest
        for number in range(len(job.prompts)):
            first = number * job.sampling.n
            told = Announcement(job.id, request_id, first, client, time.monotonic())
            self._collector.requests.announce(job.engine_id(number), told)

    def count(self, record: Record) -> None:
        """See `Extension`."""
        self._history.count(record)

    def drain(self) -> None:
        """See `Extension`."""
        self._collector.drain()

    def close(self) -> None:
        """See `Extension`."""
        self._collector.drain()
        if self._sampling is not None:
            self._sampling.cancel()

    async def _sample(self) -> None:
        while True:
            stats = await asyncio.to_thread(self._engine.stats)
            self._history.sample(stats, time.monotonic())
            await asyncio.sleep(STEP_S)

    # -- routes ------------------------------------------------------------------------------------

    def _check(self, request: Request) -> bytes | None:
        return self._access.check(request)

    def _add_endpoints(self, app: FastAPI) -> None:
        collector = self._collector

        @app.get("/v1/kv", include_in_schema=False)
        async def kv() -> Json:
            raise ApiError(
                404,
                "ask /v1/kv/model, /v1/kv/pool, /v1/kv/requests/{id}, /v1/kv/history or "
                "/v1/kv/events: each has a part of the cache's state",
                code="endpoint_not_supported",
            )

        @app.get("/v1/kv/model", dependencies=[Depends(self._check)])
        async def kv_model() -> Json:
            return describe_model(self._model, self._watched.shape)

        @app.get("/v1/kv/requests/{id}", response_model=None)
        async def kv_request(
            id: str, request: Request, index: _Place = 0, tokens_from: _Place = 0
        ) -> JSONResponse:
            client = self._check(request)
            await collector.freshen()
            one = self._find(id, index, client)
            told = await asyncio.to_thread(self._details.describe, one, tokens_from)
            return await asyncio.to_thread(JSONResponse, told)

        @app.get("/v1/kv/requests/{id}/kept", response_model=None)
        async def kv_kept(
            id: str, request: Request, chunk: _Place, index: _Place = 0
        ) -> JSONResponse:
            client = self._check(request)
            collector.flush()
            one = self._find(id, index, client)
            return JSONResponse(self._details.describe_kept(one, chunk))

        @app.get("/v1/kv/pool", response_model=None)
        async def kv_pool(request: Request) -> JSONResponse:
            client = self._check(request)
            await collector.freshen()
            told = describe_pool(collector, client)
            return await asyncio.to_thread(_spell_pool, collector.pool.arrays, told)

        @app.get("/v1/kv/history", dependencies=[Depends(self._check)])
        async def kv_history(seconds: Annotated[int, Query(ge=STEP_S, le=MOST_S)] = MOST_S) -> Json:
            return self._history.read(seconds)

    def _add_stream(self, app: FastAPI) -> None:
        @app.get("/v1/kv/events", response_model=None)
        async def kv_events(request: Request) -> Response:
            client = self._check(request)
            if record_of(request).method == "HEAD":
                return Response(media_type=Watcher.media_type)
            if len(self._collector.watchers) >= MOST_WATCHERS:
                raise ApiError(
                    429, f"{MOST_WATCHERS} clients watch already: close one of them, or wait"
                )
            watcher = Watcher(client)
            self._collector.enter(watcher)  # before anything is awaited: others are checked, too
            return _Watching(watcher, self._collector)

    def _find(self, name: str, choice: int, client: bytes | None) -> ShownCompletion:
        """Raises `ApiError` 404, the same for requests of others and for those that never were."""
        one = self._collector.requests.find(name, choice)
        if one is None or one.announcement.client != client:
            raise ApiError(
                404,
                "no such request of this key: it has not begun, or was forgotten since",
                param="id",
                code="no_such_request",
            )
        return one


class _Watching(StreamingResponse):
    """The stream of one watcher, who leaves at its end, also if it never began."""

    def __init__(self, watcher: Watcher, collector: Collector) -> None:
        super().__init__(
            aiter(watcher), media_type=watcher.media_type, headers={"Cache-Control": "no-cache"}
        )
        self._watcher, self._collector = watcher, collector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames until the stream or the client ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._collector.watchers.discard(self._watcher)


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
    for one in collector.requests.newest:
        newest.setdefault(one.conversation, one)
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


def _describe_conversation(number: int, one: ShownCompletion | None, client: bytes | None) -> Json:
    own = one.announcement if one is not None and one.announcement.client == client else None
    return {
        "number": number,
        "id": None if own is None else own.answer_id,
        "request_id": None if own is None else own.request_id,
        "tokens": 0 if one is None else len(one.reading.tokens),
    }


def _spell_pool(arrays: Mapping[str, npt.NDArray[Any]], told: Json) -> JSONResponse:
    """Millions of pages take a while: call it on a thread."""
    return JSONResponse(told | {name: encode(array) for name, array in arrays.items()})
