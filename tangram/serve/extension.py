"""What another package may add to a server: routes, and news of what the server does."""

from __future__ import annotations

from fastapi import FastAPI

from tangram.serve.bodies.body import Json
from tangram.serve.observability.record import Generation, Record
from tangram.serve.transport.api_errors import ApiError


class Extension:
    """Adds routes to a server: this one says why there is no web page.

    All is called on the server's loop but `drain`.
    """

    reason = "this server shows no cache: it was started with --page off"
    code = "page_off"

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """Add the routes; `locked` if requests need an API key."""

        @app.get("/v1/kv", include_in_schema=False)
        @app.get("/v1/kv/{rest:path}", include_in_schema=False)
        async def kv(rest: str = "") -> Json:
            raise ApiError(404, self.reason, code=self.code)

    def is_open(self, path: bytes) -> bool:
        """Whether `path`, as it came, needs no key."""
        return False

    def announce(self, generation: Generation, record: Record) -> None:
        """What the request of `record` asks for is about to be submitted."""

    def count(self, record: Record) -> None:
        """A request has its answer."""

    def drain(self) -> None:
        """End what would never end by itself: the server is about to. Any thread may call it."""
