"""The body of an answer straight to its connection: an extension of ASGI by our own server.

A message of ASGI passes every middleware, and each is a coroutine. For a stream's tokens, which
are short and many, these take longer than all else that is done for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

STATE = "tangram.direct_body"  # its name in the `state` of a request's scope


class DirectBody(Protocol):
    """Writes parts of a body after the message `http.response.start`, before the last of the body.

    The body has no Content-Length.
    """

    @property
    def writable(self) -> bool:
        """Whether the client has read nearly all that was written."""

    def write(self, part: bytes) -> None:
        """Write now, unless the client has gone; what it has not read waits in memory."""

    async def drain(self) -> None:
        """Wait until it is writable."""


def find_direct_body(scope: Mapping[str, Any]) -> DirectBody | None:
    """That of a request; None if its server has no such extension."""
    found: DirectBody | None = scope.get("state", {}).get(STATE)
    return found
