"""Those who read the stream of events, each with a bounded queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import ClassVar

from tangram.serve.bodies.body import Json

MOST_PENDING_BYTES = 1 << 20
# A silent stream says so often that it lives. Proxies close connections that are silent longer.
PING_S = 15.0


def frame(event: str, data: Json) -> bytes:
    """A server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Watcher:
    """One reader of the stream, with the key of digest `client`. Used on the server's loop alone.

    Frames that do not fit into its queue are lost, and it is told so.
    """

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, client: bytes | None) -> None:
        self.client = client
        self._frames: list[bytes] = []
        self._pending_bytes = 0
        self._lost = self._closed = False
        self._news = asyncio.Event()

    def send(self, frames: bytes) -> None:
        """Queue `frames`, if there is space. None at all end the stream after what is queued."""
        self._closed |= not frames
        if self._pending_bytes + len(frames) > MOST_PENDING_BYTES:
            self._lost = True
        else:
            self._frames.append(frames)
            self._pending_bytes += len(frames)
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The frames as they come."""
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await self._news.wait()
            except TimeoutError:
                yield b": nothing new\n\n"
                continue
            self._news.clear()
            frames, self._frames, self._pending_bytes = self._frames, [], 0
            if self._lost:
                self._lost = False
                frames.append(frame("lost", {}))
            if sent := b"".join(frames):
                yield sent
            if self._closed:
                return
