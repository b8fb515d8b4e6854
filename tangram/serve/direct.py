"""The body of an answer straight to its connection: an extension of ASGI by our own server.

A message of ASGI passes every middleware, and each is a coroutine. For a stream's tokens, which
are short and many, these take longer than all else that is done for them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

_EXTENSION = "tangram.direct_body"


class Connection(Protocol):
    """The part of the server's protocol that writes."""

    @property
    def writable(self) -> bool:
        """Whether the client has read nearly all that was written."""

    def write_part(self, part: bytes) -> None:
        """Send a part of the body of the answer under way, unless the client has gone."""

    async def drain(self) -> None:
        """Wait until it is writable."""


class DirectBody:
    """Writes parts of a body after the message `http.response.start`, before the last of the body.

    A server that has the extension puts one into each request's `scope`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> DirectBody | None:
        """That of a request; None if its server has no such extension."""
        found: DirectBody | None = scope.get("extensions", {}).get(_EXTENSION)
        return found

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        """Offer it to the application."""
        scope.setdefault("extensions", {})[_EXTENSION] = self

    @property
    def writable(self) -> bool:
        """Whether the client has read nearly all that was written."""
        return self._connection.writable

    def write(self, part: bytes) -> None:
        """Write now; what the client has not read waits in memory."""
        if part:
            self._connection.write_part(part)

    async def drain(self) -> None:
        """Wait until it is writable."""
        await self._connection.drain()
