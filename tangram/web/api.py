"""The web page as an extension of the server: its files, and the endpoints below /v1/kv."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.serve.bodies.body import Json
from tangram.serve.observability.record import Generation, Record, record_in
from tangram.serve.transport.api_errors import ApiError
from tangram.web.access import Access
from tangram.web.chat_alone import FILES, ChatWeb
from tangram.web.history import MOST_S, STEP_S
from tangram.web.questions import (
    Announcement,
    AnswerTimes,
    HistoryQuestion,
    KeptQuestion,
    ModelQuestion,
    PoolQuestion,
    Question,
    RequestQuestion,
    WebSource,
)
from tangram.web.watchers import Watcher

_Place = Annotated[int, Query(ge=0, le=1_000_000)]


class CacheWeb(ChatWeb):
    """The web page of an engine that `source` tells of."""

    def __init__(self, source: WebSource, access: Access) -> None:
        self._source, self._access = source, access
        self._watchers = set[Watcher]()

    # -- as an extension ---------------------------------------------------------------------------

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """See `Extension`."""
        self._access = replace(self._access, locked=locked)
        FILES.mount(app, self._check)
        self._add_endpoints(app)
        self._add_stream(app)

    def announce(self, generation: Generation, record: Record) -> None:
        """See `Extension`."""
        answer_id, request_id, client = generation.response_id, record.request_id, record.key_digest
        first = 0
        for request in generation.requests:
            name, now_s = request.request_id, time.monotonic()
            self._source.announce(Announcement(name, answer_id, request_id, first, client, now_s))
            first += request.sampling.n

    def count(self, record: Record) -> None:
        """See `Extension`."""
        generation = record.generation
        if generation is None or generation.first_token_s is None or record.ended_s is None:
            return
        longest = max((use.completion_tokens for use in generation.usages.values()), default=0)
        rest_s = record.ended_s - generation.first_token_s
        each_s = rest_s / (longest - 1) if longest > 1 else None
        self._source.count(AnswerTimes(generation.first_token_s - record.started_s, each_s))

    def drain(self) -> None:
        """See `Extension`."""
        for watcher in self._watchers:
            watcher.send(b"")

    # -- routes ------------------------------------------------------------------------------------

    def _check(self, request: Request) -> bytes | None:
        return self._access.check(request)

    async def _ask(self, question: Question) -> Response:
        return Response(await self._source.ask(question), media_type="application/json")

    def _add_endpoints(self, app: FastAPI) -> None:
        @app.get("/v1/kv", include_in_schema=False)
        async def kv() -> Json:
            raise ApiError(
                404,
                "ask /v1/kv/model, /v1/kv/pool, /v1/kv/requests/{id}, /v1/kv/history or "
                "/v1/kv/events: each has a part of the cache's state",
                code="endpoint_not_supported",
            )

        @app.get("/v1/kv/model", dependencies=[Depends(self._check)], response_model=None)
        async def kv_model() -> Response:
            return await self._ask(ModelQuestion())

        @app.get("/v1/kv/requests/{id}", response_model=None)
        async def kv_request(
            id: str, request: Request, index: _Place = 0, tokens_from: _Place = 0
        ) -> Response:
            client = self._check(request)
            return await self._ask(RequestQuestion(id, index, tokens_from, client))

        @app.get("/v1/kv/requests/{id}/kept", response_model=None)
        async def kv_kept(id: str, request: Request, chunk: _Place, index: _Place = 0) -> Response:
            return await self._ask(KeptQuestion(id, index, chunk, self._check(request)))

        @app.get("/v1/kv/pool", response_model=None)
        async def kv_pool(request: Request) -> Response:
            return await self._ask(PoolQuestion(self._check(request)))

        @app.get("/v1/kv/history", dependencies=[Depends(self._check)], response_model=None)
        async def kv_history(
            seconds: Annotated[int, Query(ge=STEP_S, le=MOST_S)] = MOST_S,
        ) -> Response:
            return await self._ask(HistoryQuestion(seconds))

    def _add_stream(self, app: FastAPI) -> None:
        @app.get("/v1/kv/events", response_model=None)
        async def kv_events(request: Request) -> Response:
            client = self._check(request)
            if record_in(request.scope).method == "HEAD":
                return Response(media_type=Watcher.media_type)
            watcher = Watcher(client)
            await self._source.watch(watcher)
            self._watchers.add(watcher)
            return _Watching(watcher, self)

    def leave(self, watcher: Watcher) -> None:
        """Its stream has ended."""
        self._watchers.discard(watcher)
        self._source.unwatch(watcher)


class _Watching(StreamingResponse):
    """The stream of one watcher, who leaves at its end, also if it never began."""

    def __init__(self, watcher: Watcher, web: CacheWeb) -> None:
        super().__init__(
            aiter(watcher), media_type=watcher.media_type, headers={"Cache-Control": "no-cache"}
        )
        self._watcher, self._web = watcher, web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames until the stream or the client ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._web.leave(self._watcher)
