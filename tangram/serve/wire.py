"""uvicorn's HTTP/1.1 with refusals that say what was wrong, in the OpenAI form, and an end for
clients that stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any, ClassVar

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from tangram.serve.api_errors import ApiError
from tangram.serve.guard import MAX_HEADER_BYTES
from tangram.serve.http1 import Http1, UncertainEndError

# So long may a client leave unread what was sent to it, once its buffers and ours are full.
STALLED_CLIENT_S = 30
# So long may the head of a request take, from the connection or its first byte on, and then its
# body.
HEAD_S, BODY_S = 20, 60
# A client that sends no more is asked whether it waits for its answer. What came of that is looked
# for so soon, then each time after twice as long; then it is asked again.
LOOK_FIRST_S, ASK_AGAIN_S = 0.001, 0.5
# More than can wait in any sensible queue: beyond it, whoever has asked for nothing leaves first.
MAX_CONNECTIONS = 8192


def http_protocol(connections: int) -> type[HttpProtocol]:
    """The protocol of a server that holds at most so many connections."""
    return type("BoundedHttpProtocol", (HttpProtocol,), {"max_connections": connections})


class HttpProtocol(H11Protocol):
    """Answers bytes that are no HTTP request with 400, a head that does not end with 431, one that
    takes too long with
    408. A client that sends more while it is being answered is still seen to hang up; one that has
         closed only its own
    side gets its answer.
    """

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    conn: Http1
    _half_closed = False
    _deadline: asyncio.TimerHandle | None = None
    _awaited: tuple[object, object] | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.conn = Http1(config.h11_max_incomplete_event_size or MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The kernel closes a connection whose other end has taken nothing for `STALLED_CLIENT_S`
        (tcp(7)).
        """
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_S * 1000)
        super().connection_made(transport)
        self._set_deadline()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever the client was to send is no longer waited for."""
        self._stop_deadline()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Whether to go on: it may wait for the answer to what it has
        sent.
        """
        if (
            not self._half_closed
            and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.can_ask
        ):
            self._half_closed = True
            self.conn.receive_data(b"")
            with contextlib.suppress(
                h11.RemoteProtocolError
            ):  # what stands behind its last request
                self.conn.next_event()
            self._ask_whether_there()
        return self._half_closed

    def _ask_whether_there(self) -> None:
        """A client that waits passes over this, and the system of one that has gone refuses it."""
        if self.conn.can_ask and not self.transport.is_closing():
            self.transport.write(self.conn.ask())
            self._look_whether_there(LOOK_FIRST_S)

    def _look_whether_there(self, again_s: float) -> None:
        if self.transport.is_closing() or not self.conn.can_ask:
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up()
        elif again_s < ASK_AGAIN_S:
            self.loop.call_later(again_s, self._look_whether_there, 2 * again_s)
        else:
            self.loop.call_later(again_s, self._ask_whether_there)

    def handle_events(self) -> None:
        """Reading goes on while a request is answered, because only who reads sees the client
        leave.
        """
        super().handle_events()
        if self._half_closed and self.conn.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._hang_up()  # all is answered, and no more will come
            return
        if self.conn.their_state is h11.DONE and not self.transport.is_closing():
            if len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES:
                self._hang_up()  # it sends on and on and has not read its answer
            elif self.conn.trailing_data[0]:
                self.flow.resume_reading()
        self._set_deadline()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has refused the bytes: its exception has the status that fits."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer"
        elif isinstance(error, UncertainEndError):
            msg = str(error)
        self._refuse(status, msg)

    def _refuse(self, status: int, message: str) -> None:
        """The last word on this connection; if an answer has begun, or is out, there is no room for
        it.
        """
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
        """Close, and let the application know now: what it still says would be sent to nobody."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that waits for a request and has the least time left for that; this
        one, if all work.
        """
        others = {
            other: other.idle_until_s()
            for other in self.connections
            if isinstance(other, HttpProtocol)
        }
        idle = {
            other: until_s
            for other, until_s in others.items()
            if until_s is not None and other is not self
        }
        if idle:
            min(idle, key=idle.__getitem__).transport.close()
        else:
            self._refuse(
                503, f"{self.max_connections} connections are being answered: try again in a while"
            )

    def refuse_rest(self) -> None:
        """Where a request's body is still on its way: it comes too late, the server ends."""
        if self.conn.their_state is h11.SEND_BODY:
            self._refuse(
                503,
                "the server is shutting down, the rest of the body was not waited for: try again",
            )

    def idle_until_s(self) -> float | None:
        """When the connection ends by itself, on the loop's clock, if no request comes; None in the
        middle of one.
        """
        timer = self.timeout_keep_alive_task or self._deadline
        return (
            timer.when()
            if self.conn.their_state is h11.IDLE and timer and not self.transport.is_closing()
            else None
        )

    def _set_deadline(self) -> None:
        """For what the client is to send now. It is not put off by a byte of it."""
        state = self.conn.their_state
        limits_s = {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S}
        # After an answer uvicorn has a clock of its own, up to the first byte of what follows.
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
