"""h11, with what RFC 9112 requires of a server beyond it."""

from __future__ import annotations

from typing import Any

import h11

_LENGTHS = {b"transfer-encoding", b"content-length"}


class UncertainEndError(h11.RemoteProtocolError):
    """A request with two different ends."""


class Http1(h11.Connection):
    """The server's side of a connection."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._tells_events = self._is_chunked = self._in_chunks = False

    def next_event(self) -> Any:
        """As h11 has it. Raises `UncertainEndError`."""
        if self.their_state is h11.IDLE:
            self._skip_empty_lines()
        event = super().next_event()
        if isinstance(event, h11.ConnectionClosed):
            return h11.NEED_DATA  # uvicorn would ask on and on
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
            # A proxy may have read another end than this server (RFC 9112, 6.1).
            message = "Transfer-Encoding and Content-Length are both there: send one of them"
            raise UncertainEndError(message)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """As h11 has it."""
        sent = super().send(event)
        if isinstance(event, h11.Response):
            self._tells_events = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in event.headers
            )
            self._is_chunked = b"transfer-encoding: chunked" in (sent or b"").lower()
        self._in_chunks = self._is_chunked and self.our_state is h11.SEND_BODY
        return sent

    def send_part(self, part: bytes) -> bytes:
        """What h11 makes of a part of a body, without its checks: a token each in a stream."""
        if self._in_chunks:
            return b"%x\r\n%b\r\n" % (len(part), part)
        return self.send(h11.Data(data=part)) or b""

    @property
    def can_ask(self) -> bool:
        """Whether a waiting client can be sent something that it ignores."""
        begun = self.our_state is h11.SEND_BODY
        waits = self.our_state is h11.SEND_RESPONSE or (begun and self._tells_events)
        return waits and self.their_http_version != b"1.0"

    def ask(self) -> bytes:
        """Something that it ignores: an interim response (RFC 9110, 15.2), or in a stream a
        comment.
        """
        if self.our_state is h11.SEND_BODY:
            return self.send(h11.Data(data=b":\n\n")) or b""
        asked = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        return self.send(asked) or b""

    def _skip_empty_lines(self) -> None:
        """Skip empty lines before a request (RFC 9112, 2.2): some clients end a body with one."""
        waiting, _ = self.trailing_data
        if empty := len(waiting) - len(waiting.lstrip(b"\r\n")):
            self._receive_buffer.maybe_extract_at_most(empty)
