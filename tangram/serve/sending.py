"""Server-sent events to one client, which may be slow or disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.serve.bridge import EventStream

_log = logging.getLogger(__name__)


class EventSource(StreamingResponse):
    """Sends `frames`, which are written from `events`, and closes `events` at the end.

    It closes them too if the response never began. A client that falls too far behind gets no
    error: its buffers are full. The response then ends in the middle.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[str], events: EventStream) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the client end."""
        sending = asyncio.create_task(super().__call__(scope, receive, send))
        overrun = asyncio.create_task(self._events.overrun.wait())
        try:
            await asyncio.wait({sending, overrun}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                _log.warning("a stream is ended: its client does not read")
        finally:
            self._events.close()
            for task in (sending, overrun):
                task.cancel()
            await asyncio.gather(sending, overrun, return_exceptions=True)
