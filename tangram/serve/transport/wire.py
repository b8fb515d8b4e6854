"""uvicorn's HTTP/1.1, with errors in the OpenAI form and time limits for clients that stall."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from tangram.serve.transport.api_errors import ApiError
from tangram.serve.transport.guard import MAX_HEADER_BYTES
from tangram.serve.transport.http1 import Http1

# A client may leave data unread for this time, once its buffers and ours are full.
STALLED_CLIENT_S = 30
# The most time for the head of a request, from the connection or its first byte, and for its body.
HEAD_S, BODY_S = 20, 60
# After a client has closed its sending side, we send something that it ignores. We look for an
# error after `LOOK_FIRST_S`, then after twice as long each time, up to `ASK_AGAIN_S`.
LOOK_FIRST_S, ASK_AGAIN_S = 0.001, 0.5
# More than a queue can hold. Beyond it, idle connections are closed first.
MAX_CONNECTIONS = 8192
_STATE = "tangram.connection"  # its name in the `state` of a request's scope


def http_protocol(connections: int) -> type[HttpProtocol]:
    """The protocol of a server with at most so many connections."""
    return type("BoundedHttpProtocol", (HttpProtocol,), {"max_connections": connections})


class HttpProtocol(H11Protocol):
    """HTTP/1.1 for one connection.

    Bytes that are no HTTP request get a 400, an endless head a 431, a slow one a 408. While a
    request is answered, a client that sends more is still seen to disconnect. A client that has
    closed only its sending side gets its answer.
    """

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    conn: Http1
    _half_closed = False
    _deadline: asyncio.TimerHandle | None = None
    _awaited: tuple[object, object] | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.conn = Http1(h11.SERVER, config.h11_max_incomplete_event_size or MAX_HEADER_BYTES)
        self.app_state = self.app_state | {_STATE: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Have the kernel close a connection whose client reads nothing for `STALLED_CLIENT_S`
        (tcp(7)).
        """
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_S * 1000)
        # asyncio leaves it off for sockets that were opened without naming TCP. A body would then
        # wait up to 40 ms for the client to acknowledge the head before it (RFC 1122, 4.2.3.2).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._set_deadline()
        if len(self.connections) > self.max_connections:
            self._close_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for the client."""
        self._stop_deadline()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection after the client has closed its sending side.

        The client may wait for the answer to what it has sent.
        """
        has_asked = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if not self._half_closed and has_asked and self.conn.can_ask:
            self._half_closed = True
            self._look_whether_there(ASK_AGAIN_S)
        return self._half_closed

    def _look_whether_there(self, waited_s: float) -> None:
        """Send what a waiting client ignores, and the system of a client that has gone refuses."""
        if self.transport.is_closing() or not self.conn.can_ask:
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up()
            return
        wait_s = 2 * waited_s
        if waited_s >= ASK_AGAIN_S:
            self.transport.write(self.conn.ask())
            wait_s = LOOK_FIRST_S
        self.loop.call_later(wait_s, self._look_whether_there, wait_s)

    def handle_events(self) -> None:
        """Go on reading while a request is answered: only that shows a disconnect."""
        super().handle_events()
        if self._half_closed and self.conn.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._hang_up()  # all is answered, and no more will come
            return
        if self._half_closed and self.conn.their_state is h11.SEND_BODY:
            self._refuse(400, "the connection ended before the request's body: send all of it")
            return
        if self.conn.their_state is h11.DONE and not self.transport.is_closing():
            if len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES:
                self._hang_up()  # it sends on and on and has not read its answer
            else:
                self.flow.resume_reading()
        self._set_deadline()

    @property
    def writable(self) -> bool:
        """Whether the client has read nearly all that was written."""
        return not self.flow.write_paused

    async def drain(self) -> None:
        """Wait until it is writable."""
        await self.flow.drain()

    def write(self, part: bytes) -> None:
        """Write a part of a body, unless the client has gone; what it has not read waits in memory.

        For bodies without Content-Length, after the message `http.response.start`. A message of
        ASGI passes every middleware, and each is a coroutine: for a token, these and the checks of
        h11 take longer than all else that is done for it.
        """
        if part and not self.cycle.disconnected:
            in_chunks = (self.conn.their_http_version or b"") >= b"1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if in_chunks else part)

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has refused the bytes. Its exception has the status."""
        error = cast("h11.RemoteProtocolError", sys.exception())
        too_long = f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer"
        status = error.error_status_hint
        # Without the bytes themselves, which may be a key.
        reason = str(error).partition(": bytearray")[0]
        self._refuse(status, too_long if status == 431 else reason)

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and close; only close if an answer has begun or is sent."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = bytes(ApiError(status, message).response().body)
            head = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ]
            for event in (
                h11.Response(status_code=status, headers=[*head, (b"connection", b"close")]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._hang_up()

    def _hang_up(self) -> None:
        """Close, and tell the application at once that the client is gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _close_idle(self) -> None:
        """Close the idle connection that would time out first; this connection, if none is idle."""
        others = (each for each in self.connections if isinstance(each, HttpProtocol))
        idle = {
            other: until_s
            for other in others
            if other is not self and (until_s := other.idle_until_s()) is not None
        }
        if idle:
            min(idle, key=idle.__getitem__).transport.close()
        else:
            self._refuse(
                503, f"{self.max_connections} connections are being answered: try again in a while"
            )

    def refuse_rest(self) -> None:
        """Refuse a request whose body is still being sent: the server ends."""
        if self.conn.their_state is h11.SEND_BODY:
            self._refuse(
                503,
                "the server is shutting down, the rest of the body was not waited for: try again",
            )

    def idle_until_s(self) -> float | None:
        """When an idle connection times out, on the loop's clock; None while it has a request."""
        timer = self.timeout_keep_alive_task or self._deadline
        return (
            timer.when()
            if self.conn.their_state is h11.IDLE and timer and not self.transport.is_closing()
            else None
        )

    def _set_deadline(self) -> None:
        """Set the time limit for what the client sends next. More bytes do not extend it."""
        state = self.conn.their_state
        limits_s = {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S}
        # After an answer uvicorn has a timer of its own, up to the first byte of the next request.
        waits = (
            state in limits_s
            and self.timeout_keep_alive_task is None
            and not self.transport.is_closing()
        )
        awaited = (state, self.cycle) if waits else None
        if awaited == self._awaited:
            return
        self._stop_deadline()
        self._awaited = awaited
        if waits:
            what = "head" if state is h11.IDLE else "body"
            message = f"the request's {what} took longer than {limits_s[state]} s: send it faster"
            self._deadline = self.loop.call_later(limits_s[state], self._refuse, 408, message)

    def _stop_deadline(self) -> None:
        self._awaited = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def find_connection(scope: Mapping[str, Any]) -> HttpProtocol | None:
    """That of a request, to write its body at once; None if another server has read it."""
    found: HttpProtocol | None = scope.get("state", {}).get(_STATE)
    return found
