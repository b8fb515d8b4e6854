"""One answer, read once: what the engine reports of a request, as typed events.

An endpoint has a `Writer`, which spells these events. `write_stream` and `write_whole` call it, so
a streamed answer and a whole one come from the same events.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from tangram.engine.text.answer_text import AnswerText
from tangram.serve.answers.bridge import EventStream
from tangram.serve.bodies.body import Json
from tangram.serve.formats.thoughts import Part, Reader
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Event, FinishReason, PromptLogprobs, TokenLogprob, Usage

# Clients cut streams into lines as Python's `splitlines` does, httpx for one. It knows these ends
# too; JSON itself escapes the others.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
Finish = Literal["stop", "length", "tool_calls"]
CANCELLED = "response_cancelled"  # the code of an answer that another request has ended


class AnswerUsage(Struct, frozen=True, gc=False):
    """What an answer has used, or one completion of it. `reasoning_tokens` were thoughts.

    `explain` says of a whole answer why its prompt was not reused, if the client asks for it.
    """

    engine: Usage
    reasoning_tokens: int
    explain: Callable[[], Json] | None = None

    @property
    def prompt_details(self) -> Json:
        """What of the prompt was reused, and why no more."""
        reused: Json = {"cached_tokens": self.engine.cached_tokens}
        return reused if self.explain is None else reused | {"reuse": self.explain()}


class Delta(Struct, frozen=True):
    """What one event adds to completion `choice`; `finish` says why the completion has ended.

    `usage` is that of this completion so far, `stop_string` the text that has ended it.
    """

    choice: int
    is_first: bool
    parts: Sequence[Part]
    logprobs: Sequence[TokenLogprob]
    finish: Finish | None
    usage: AnswerUsage
    stop_string: str | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()

    @property
    def plain_text(self) -> str | None:
        """The text, if the completion has begun, goes on, and that is all of this."""
        if self.is_first or self.finish is not None or len(self.parts) != 1:
            return None
        return part if isinstance(part := self.parts[0], str) else None


@dataclass(frozen=True)
class Failure:
    """The answer ends here with an error."""

    error: ApiError


@dataclass(frozen=True)
class End:
    """All completions have ended; `usage` is that of all of them."""

    usage: AnswerUsage


AnswerEvent = Delta | Failure | End


class Answer:
    """The events of `stream`, each completion split into parts by a reader of its own.

    `new_text` makes what reads the text of a choice; for `explain` see `AnswerUsage`. Take or
    iterate `Delta`s, then one `Failure` or `End`; then it has `ended`, by `failure` if that is set.
    `close` it in any case.
    """

    def __init__(
        self,
        stream: EventStream,
        new_text: Callable[[int], AnswerText],
        new_reader: Callable[[], Reader],
        explain: Callable[[], Json] | None = None,
    ) -> None:
        self.stream, self._new_text, self.ended = stream, new_text, False
        self.closed = False
        self.failure: ApiError | None = None
        self._explain = explain
        self._texts: dict[int, AnswerText] = {}
        self._readers = defaultdict[int, Reader](new_reader)
        self._reasoning_tokens = defaultdict[int, int](int)

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Every event of the answer."""
        more = asyncio.Event()
        self.stream.follow(more.set)
        while not self.ended:
            more.clear()
            if (event := self.take()) is None:
                await more.wait()
            else:
                yield event

    def take(self) -> AnswerEvent | None:
        """The next event of the answer; None until there is more."""
        try:
            if not self.stream.ended:
                news = self.stream.take()
                return None if news is None else self._make_delta(*news)
        except ApiError as error:
            self.ended, self.failure = True, error
            return Failure(error)
        self.ended = True
        thoughts = sum(self._reasoning_tokens.values())
        return End(AnswerUsage(self.stream.generation.usage, thoughts, self._explain))

    def cancel(self) -> None:
        """End it with an error. Its pages are free at the next step."""
        message = "the response was cancelled or removed by another request"
        self.stream.fail(ApiError(409, message, code=CANCELLED))

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        self.closed = True
        self.stream.close()

    def _make_delta(self, choice: int, event: Event) -> Delta:
        is_first, reader = choice not in self._texts, self._readers[choice]
        if is_first:
            self._texts[choice] = self._new_text(choice)
        was_thinking = reader.thinking
        parts = list(reader.push(self._texts[choice].take(event)))
        if was_thinking or reader.thinking:
            self._reasoning_tokens[choice] += len(event.token_ids)
        if event.finish_reason is not None:
            parts += reader.finish()
        usage = AnswerUsage(event.usage, self._reasoning_tokens[choice])
        finish = _name_finish(event.finish_reason, reader)
        stop = self._texts[choice].stop_string
        scores = event.prompt_logprobs
        return Delta(choice, is_first, parts, event.logprobs, finish, usage, stop, scores)


def _name_finish(reason: FinishReason | None, reader: Reader) -> Finish | None:
    """The reason as clients know it. `EventStream` turns an abort into an error."""
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reader.called else "stop"


class Writer(ABC):
    """How one endpoint spells one answer, as server-sent events or as one JSON object."""

    async def open(self, answer: Answer) -> Json | None:
        """Called before anything is written of `answer`.

        Returns what the client reads at once, if the answer is to run in the background.
        """
        return None

    async def settle(self, usage: AnswerUsage) -> None:
        """Called before the end is written."""
        return

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """What a stream has before the first event."""

    @abstractmethod
    def write(self, event: AnswerEvent) -> Iterable[str]:
        """What a stream has of `event`."""

    def ping(self) -> str:
        """What a stream has while nothing happens."""
        return ""

    @abstractmethod
    def gather(self, delta: Delta) -> None:
        """Keep `delta` for the whole answer."""

    @abstractmethod
    def write_whole(self, usage: AnswerUsage) -> Json:
        """The whole answer, once all of it is gathered. May run on any thread."""


async def write_stream(answer: Answer, writer: Writer) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    for frame in writer.begin():
        yield frame
    async for event in answer:
        if isinstance(event, End):
            await writer.settle(event.usage)
        for frame in writer.write(event):
            yield frame


async def write_whole(answer: Answer, writer: Writer) -> Json:
    """The answer in one piece. Raises `ApiError` if it fails; aborts what is given up."""
    try:
        async for event in answer:
            match event:
                case Delta():
                    writer.gather(event)
                case Failure(error):
                    raise error
                case End(usage):
                    await writer.settle(usage)
                    # A large answer takes long to write: on this thread, every stream would wait.
                    return await asyncio.to_thread(writer.write_whole, usage)
        raise AssertionError("an answer ends with End or Failure")
    finally:
        answer.close()


def write_event(kind: str, fields: Json) -> str:
    """An event of a stream that names its `kind`, in its data too."""
    return f"event: {kind}\ndata: {write_line({'type': kind, **fields})}\n\n"


def write_line(data: Json | str) -> str:
    """`data` as JSON on one line, whatever a client takes for the end of a line."""
    text = msgspec.json.encode(data).decode()
    return text if text.isascii() else text.translate(_LINE_ENDS)
