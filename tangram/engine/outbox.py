"""Events on their way out. Those of a step go together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from tangram.types import Event, Request

_log = logging.getLogger("tangram")


class Outbox:
    """Events that wait for `send`, in order. For the engine's thread.

    `publish` publishes the engine's statistics. It is called before an answer's last event is sent,
    so that a client which hears of the end finds nothing of its request there.
    """

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._events = deque[tuple[Request, Event]]()
        self._has_end = False

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, request: Request, event: Event) -> None:
        """Keep an event of `request` until `send`."""
        self._events.append((request, event))
        self._has_end |= event.finish_reason is not None

    def send(self) -> None:
        """Tell each request its events. One that fails to hear is logged; the others are told."""
        if self._has_end:
            self._has_end = False
            try:
                self._publish()
            except Exception:
                _log.exception("the engine's statistics could not be read")
        while self._events:
            request, event = self._events.popleft()
            try:
                request.on_event(event)
            except Exception:
                request_id = request.request_id
                _log.exception(
                    "request %s could not be told of its tokens",
                    request_id,
                    extra={"request_id": request_id},
                )
