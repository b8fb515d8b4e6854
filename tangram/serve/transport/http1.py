"""h11, with what RFC 9112 requires of a server beyond it."""

from __future__ import annotations

from typing import Any

import h11

_LENGTHS = {b"transfer-encoding", b"content-length"}


class Http1(h11.Connection):
    """The server's side of a connection."""

    _tells_events = False

    def next_event(self) -> Any:
        """As h11 has it. Raises `h11.RemoteProtocolError` also for a request with two ends."""
        if self.their_state is h11.IDLE:
            # Skip empty lines (RFC 9112, 2.2): some clients end a body with an empty line.
            waiting, _ = self.trailing_data
            self._receive_buffer.maybe_extract_at_most(len(waiting) - len(waiting.lstrip(b"\r\n")))
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
            # A proxy may have read another end than this server (RFC 9112, 6.1).
            message = "Transfer-Encoding and Content-Length are both there: send one of them"
            raise h11.RemoteProtocolError(message)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """As h11 has it."""
        if isinstance(event, h11.Response):
            kinds = (value for name, value in event.headers if name == b"content-type")
            self._tells_events = any(kind.startswith(b"text/event-stream") for kind in kinds)
        return super().send(event)

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
