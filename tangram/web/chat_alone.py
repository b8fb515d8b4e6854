"""The page of a server of several engines: conversations without the cache beside them."""

from __future__ import annotations

from fastapi import FastAPI

from tangram.serve.api_errors import ApiError
from tangram.serve.body import Json
from tangram.serve.record import Generation, Record
from tangram.web.files import FILES


class ChatPage:
    """An `Extension` that serves the page's files; the endpoints below /v1/kv answer 404.

    The files hold no data, so every client may have them.
    """

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """See `Extension`."""
        FILES.mount(app)

        @app.get("/v1/kv", include_in_schema=False)
        @app.get("/v1/kv/{rest:path}", include_in_schema=False)
        async def kv(rest: str = "") -> Json:
            raise ApiError(
                404,
                "several engines answer here, and the page shows the cache of one; the metrics "
                "tangram_replica_… tell of each",
                code="several_engines",
            )

    def is_open(self, path: bytes) -> bool:
        """See `Extension`."""
        return FILES.has(path)

    def start(self) -> None:
        """See `Extension`."""

    def announce(self, generation: Generation, record: Record) -> None:
        """See `Extension`."""

    def count(self, record: Record) -> None:
        """See `Extension`."""

    def drain(self) -> None:
        """See `Extension`."""

    def close(self) -> None:
        """See `Extension`."""
