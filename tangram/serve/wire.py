"""uvicorn's HTTP/1.1 with refusals that say what was wrong, in the OpenAI form, and an end for clients that stall."""

from __future__ import annotations

import asyncio
import socket
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tangram.serve.errors import ApiError
from tangram.serve.guard import MAX_HEADER_BYTES

# So long may a client leave unread what was sent to it, once its buffers and ours are full.
STALLED_CLIENT_S = 30


class HttpProtocol(H11Protocol):
    """Answers bytes that are no HTTP request with 400, and a head that does not end with 431."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The kernel closes a connection whose other end has taken nothing for `STALLED_CLIENT_S` (tcp(7))."""
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_S * 1000)
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has refused the bytes: its exception has the status that fits."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer"
        body = bytes(ApiError(status, msg).response().body)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        for event in (
            h11.Response(status_code=status, headers=[*head, (b"connection", b"close")]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
