"""Streams over HTTP, of clients in processes of their own.

While streams run, a client notes when bytes come, and nothing else. It reads them at the end.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import h11

from tangram_lab.load.clock import Patience, TimedAnswer

# From the word to begin to the first request: all clients have it by then.
HEAD_START_S = 0.05
STOP = "stop"  # to clients, when patience is lost
Parts = Sequence[tuple[float, bytes]]  # what came, and when


@dataclass(frozen=True)
class Post:
    """One request: a path, a body, and its time in seconds from the start of the run."""

    path: str
    body: dict[str, Any]
    at_s: float = 0.0


@dataclass
class StreamedAnswer:
    """The answer to one `Post`: a text and a time, from the start of the run, for each chunk."""

    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class ClientCost:
    """What a client used of its processor while streams ran, which took `seconds`."""

    cpu_s: float
    seconds: float


def read_events(parts: Parts) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event in a whole answer, and the time of its last byte.

    Raises `ValueError` if the status is not 200, or if the answer ends early.
    """
    connection, rest, status, ended = h11.Connection(h11.CLIENT), b"", 0, False
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "server")]))
    connection.send(h11.EndOfMessage())
    for at_s, part in parts:
        connection.receive_data(part)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                rest += event.data
            else:
                ended = True
                break
        if status == 200:
            *events, rest = rest.split(b"\n\n")
            yield from ((at_s, found.removeprefix(b"data: ")) for found in events)
    if status != 200 or not ended or rest:
        raise ValueError(f"a stream has status {status} and ends with {rest[-500:]!r}")


def read_completion(parts: Parts) -> StreamedAnswer:
    """The answer to a streamed /v1/completions with `include_usage`.

    Raises `ValueError` if it has an error, or lacks the usage or its end.
    """
    answer, last = StreamedAnswer(), b""
    for at_s, last in read_events(parts):
        if last == b"[DONE]":
            continue
        chunk = json.loads(last)
        if "choices" not in chunk:
            raise ValueError(f"a stream has an error: {last!r}")
        for choice in chunk["choices"]:
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if choice["text"]:
                answer.times_s.append(at_s)
                answer.texts.append(choice["text"])
        if (usage := chunk.get("usage")) is not None:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens") or 0
    if last != b"[DONE]" or not answer.prompt_tokens:
        raise ValueError(f"a stream ends without its usage or its end: {last!r}")
    return answer


class StreamClients:
    """`count` processes that ask the server at `port` of this machine; close them at the end."""

    def __init__(self, port: int, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._all: list[tuple[BaseProcess, Connection]] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_client, args=(port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._all.append((process, ours))

    def answer_all(
        self,
        posts: Sequence[Post],
        look: Callable[[], dict[str, float]],
        patience: Patience | None = None,
    ) -> tuple[list[StreamedAnswer], list[ClientCost], dict[str, float], dict[str, float]]:
        """Send each at its time, and read all streams to their ends.

        The last two of what comes back is what `look` says when all requests are prepared, and when
        the last stream has ended. Raises `ValueError` for a stream that cannot be read, and
        `GivenUpError` when `patience` is lost; all connections are closed then.
        """
        count, pipes = len(self._all), [pipe for _, pipe in self._all]
        for place, pipe in enumerate(pipes):
            pipe.send((posts[place::count], patience))
        for pipe in pipes:
            pipe.recv()
        before = look()
        begin_s = time.perf_counter() + HEAD_START_S
        for pipe in pipes:
            pipe.send(begin_s)
        costs, lost = self._await_all(len(posts), patience)
        now_s, after = time.perf_counter() - begin_s, look()
        answers: list[StreamedAnswer] = [StreamedAnswer()] * len(posts)
        errors = []
        for place, pipe in enumerate(pipes):
            match pipe.recv():
                case str(error):
                    errors.append(error)
                case found:
                    answers[place::count] = found
        if patience is not None and lost:
            timed = [
                TimedAnswer(post.at_s, 0, one.times_s)
                for post, one in zip(posts, answers, strict=True)
            ]
            raise patience.give_up(timed, now_s)
        if errors:
            raise ValueError(errors[0])
        return answers, costs, before, after

    def _await_all(self, requests: int, patience: Patience | None) -> tuple[list[ClientCost], bool]:
        """What clients used; ends them all when too many of the requests are late."""
        costs: dict[Connection, ClientCost] = {}
        late, lost = dict[Connection, int](), False
        running = [pipe for _, pipe in self._all]
        while running:
            for pipe in cast(list[Connection], wait(running)):
                match pipe.recv():
                    case int(count):
                        late[pipe] = count
                    case cost:
                        costs[pipe] = cost
                        running.remove(pipe)
            if patience is not None and not lost and patience.is_lost(sum(late.values()), requests):
                lost = True
                for pipe in running:
                    pipe.send(STOP)
        return [costs[pipe] for _, pipe in self._all], lost

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._all:
            pipe.close()  # which ends it, unless streams run
            process.terminate()
        for process, _ in self._all:
            process.join()


def _run_client(port: int, pipe: Connection) -> None:
    """Answer the other end of `pipe` until it is closed."""
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            return
        if given == STOP:  # of a run that had ended here
            continue
        posts, patience = given
        sent = [_Sent(post.at_s, _spell(post)) for post in posts]
        pipe.send("prepared")
        begin_s, used_s = pipe.recv(), time.process_time()
        whole = asyncio.run(_send_all(port, sent, begin_s, pipe, patience))
        pipe.send(ClientCost(time.process_time() - used_s, time.perf_counter() - begin_s))
        try:
            pipe.send(
                [read_completion(one.parts) if whole else one.read_beginning() for one in sent]
            )
        except ValueError as error:
            pipe.send(str(error))


def _spell(post: Post) -> bytes:
    body = json.dumps(post.body).encode()
    head = (
        f"POST {post.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class _Sent:
    """A request, its time, and what came of its answer."""

    at_s: float
    request: bytes
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    def read_beginning(self) -> StreamedAnswer:
        """The time of the first event, if it has come."""
        first = next(([at_s] for at_s, part in self.parts if b"data:" in part), [])
        return StreamedAnswer(times_s=first)


async def _send_all(
    port: int, sent: Sequence[_Sent], begin_s: float, pipe: Connection, patience: Patience | None
) -> bool:
    """Whether all streams have ended, and not by the word of the other end of `pipe`."""
    streams = asyncio.gather(*(_send(port, one, begin_s) for one in sent))
    while patience is not None:
        done, _ = await asyncio.wait([streams], timeout=patience.every_s)
        if done:
            break
        now_s = time.perf_counter() - begin_s
        begun = [TimedAnswer(one.at_s, 0, one.read_beginning().times_s) for one in sent]
        pipe.send(sum(patience.is_late(one, now_s) for one in begun))
        if pipe.poll():
            pipe.recv()
            streams.cancel()
            await asyncio.wait([streams])
            return False
    await streams
    return True


async def _send(port: int, sent: _Sent, begin_s: float) -> None:
    await asyncio.sleep(begin_s + sent.at_s - time.perf_counter())
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(
        lambda: _Stream(sent, begin_s, loop.create_future()), "127.0.0.1", port
    )
    try:
        await stream.ended
    finally:
        transport.abort()


class _Stream(asyncio.Protocol):
    """One connection: sends what is asked, and notes what comes until it has `ended`."""

    def __init__(self, sent: _Sent, begin_s: float, ended: asyncio.Future[None]) -> None:
        self._sent, self._begin_s, self.ended = sent, begin_s, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._sent.request)

    def data_received(self, data: bytes) -> None:
        self._sent.parts.append((time.perf_counter() - self._begin_s, data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
