"""Server-sent events to one client, which may be slow or disconnected."""

from __future__ import annotations

import asyncio
import logging

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.serve.answers.answer import Answer, End, Writer, write_stream
from tangram.serve.transport.wire import HttpProtocol, find_connection

PING_S = 10.0
_log = logging.getLogger(__name__)


class EventSource(StreamingResponse):
    """Sends `answer` as `writer` spells it, and closes it at the end.

    It closes the answer too if the response never began. A client that falls too far behind gets
    no error: its buffers are full. The response then ends in the middle.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, writer: Writer) -> None:
        super().__init__(write_stream(answer, writer), headers={"Cache-Control": "no-cache"})
        self._answer, self._writer = answer, writer
        self._connection: HttpProtocol | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the client end."""
        self._connection = find_connection(scope)
        sending = asyncio.create_task(super().__call__(scope, receive, send))
        overrun = asyncio.create_task(self._answer.stream.overrun.wait())
        try:
            await asyncio.wait({sending, overrun}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                _log.warning("a stream is ended: its client does not read")
        finally:
            self._answer.close()
            for task in (sending, overrun):
                task.cancel()
            await asyncio.gather(sending, overrun, return_exceptions=True)

    async def stream_response(self, send: Send) -> None:
        """Send head, events and end."""
        if self._connection is None:
            await super().stream_response(send)
            return
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        await self._pour(self._connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pour(self, connection: HttpProtocol) -> None:
        """Write each event when the engine tells it: no task wakes up for a token."""
        halted, failures, ends = asyncio.Event(), list[Exception](), list[End]()

        def pour() -> None:
            try:
                while connection.writable and not self._answer.ended:
                    if (event := self._answer.take()) is None:
                        return
                    if isinstance(event, End):
                        ends.append(event)
                    else:
                        connection.write("".join(self._writer.write(event)).encode())
            except Exception as error:
                failures.append(error)
            halted.set()

        connection.write("".join(self._writer.begin()).encode())
        self._answer.stream.follow(pour)
        while not (self._answer.ended or failures):
            halted.clear()
            pour()
            await self._ping_until(halted, connection)
            await connection.drain()
        if failures:
            raise failures[0]
        for end in ends:
            await self._writer.settle(end.usage)
            connection.write("".join(self._writer.write(end)).encode())
            await connection.drain()

    async def _ping_until(self, halted: asyncio.Event, connection: HttpProtocol) -> None:
        """Return once it is set; meanwhile show the client that the server is there."""
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await halted.wait()
                return
            except TimeoutError:
                connection.write(self._writer.ping().encode())
