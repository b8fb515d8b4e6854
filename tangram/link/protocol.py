"""What API processes and the engine's process tell each other, as msgspec spells it.

They talk over pairs of sockets. A message is its length, four bytes, and so many bytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection
from reprlib import repr as shortened
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tangram.errors import EngineError, MachineError, OverloadError, RequestError
from tangram.metrics import EngineStats
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Event, Grammar, Marks, Request, RequestOptions, SamplingParams
from tangram.web.questions import Announcement, AnswerTimes, Question

if TYPE_CHECKING:
    from tangram.types import Int32

_LENGTH = struct.Struct("!I")
# A field's name in a text that can be said of any field; no text has it.
_FIELD = "\0field\0"
# Tokens travel as int32.
_MOST_TOKEN = 2**31 - 1


class RequestMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request on its way: tokens as the bytes of int32 [n], a grammar as its text and field."""

    request_id: str
    tokens: bytes
    sampling: SamplingParams
    options: RequestOptions
    grammar: tuple[str, str] | None
    marks: Marks
    client: bytes = b""

    @classmethod
    def of(
        cls, request: Request, vocab_size: int, prompt: npt.NDArray[np.integer] | None = None
    ) -> RequestMessage:
        """`request` without its callback. Raises `RequestError` for numbers that cannot travel.

        `prompt` are its tokens, if they are known to lie in the vocabulary.
        """
        grammar, given = request.grammar, request.prompt_token_ids
        named = request.sampling.named_tokens
        for field, tokens in named if prompt is not None else (("prompt", given), *named):
            _check_tokens(tokens, field, vocab_size)
        return cls(
            request.request_id,
            np.asarray(given if prompt is None else prompt, np.int32).tobytes(),
            request.sampling,
            request.options,
            None if grammar is None else (grammar.source, grammar.field),
            request.marks,
            request.client,
        )

    @property
    def prompt(self) -> Int32:
        """The tokens, int32 [n]."""
        return np.frombuffer(self.tokens, np.int32)

    def request(self, on_event: Callable[[Event], None], grammar: Grammar | None) -> Request:
        """The request where it arrives; `grammar` is compiled there."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt.tolist()),
            sampling=self.sampling,
            on_event=on_event,
            grammar=grammar,
            marks=self.marks,
            client=self.client,
            **vars(self.options),
        )


def _check_tokens(token_ids: Collection[int], field: str, vocab_size: int) -> None:
    """The engine compares tokens with its vocabulary; numbers this large do not reach it."""
    ends = min(token_ids, default=0), max(token_ids, default=0)
    wrong = next((token for token in ends if abs(token) > _MOST_TOKEN), None)
    if wrong is not None:
        said = f"has token {shortened(wrong)}, it must lie in [0, {vocab_size - 1}]"
        raise RequestError(lambda name: f"{name} {said}", field)


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error about what was asked, which is raised where that comes from."""

    kind: str
    text: str
    field: str = ""
    retry_after_s: int = 0
    code: str = ""
    status: int = 0

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """What says `error`; of a fault of the engine's code, that it has a fault."""
        match error:
            case RequestError():
                return cls("request", str(error.rename(error.field, _FIELD)), error.field)
            case OverloadError():
                return cls("overload", str(error), "", error.retry_after_s, error.code)
            case MachineError():
                return cls("machine", str(error))
            case EngineError():
                return cls("engine", str(error))
            case ApiError():
                param, code = error.param or "", error.code or ""
                return cls("api", str(error), param, code=code, status=error.status)
            case _:
                return cls("fault", "the engine's process could not answer: its log has the reason")

    @property
    def error(self) -> Exception:
        """The error that it says."""
        match self.kind:
            case "request":
                return RequestError(lambda name: self.text.replace(_FIELD, name), self.field)
            case "overload":
                return OverloadError(self.text, self.retry_after_s, self.code)
            case "machine":
                return MachineError(self.text)
            case "engine":
                return EngineError(self.text)
            case "api":
                param, code = self.field or None, self.code or None
                return ApiError(self.status, self.text, param=param, code=code)
            case _:
                return RuntimeError(self.text)


# From an API process.


class Submission(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """Submit `requests`, all or none; the `PortAnswer` has the same `number`, here and below."""

    number: int
    requests: list[RequestMessage]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """End a request."""

    request_id: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The API process answers requests."""


class WebAsk(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A question of the web page."""

    number: int
    question: Question


class WebWatch(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Tell watcher `number`, of the key of digest `client`, what is new on the web page."""

    number: int
    client: bytes | None


class WebUnwatch(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Tell watcher `number` nothing more."""

    number: int


# From the engine's process.


class Queue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many completions wait, and what is said to another if that is too many."""

    waiting: int = 0
    full: Refusal | None = None


class PortAnswer(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """The answer to what has this `number`: JSON for the web page, else nothing; or a refusal."""

    number: int
    body: bytes
    refusal: Refusal | None
    queue: Queue


class StepNews(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """What a step has brought: events, the state of the queue, and statistics if they are new.

    `ended` says that the engine's thread has, `hangs` that its step takes too long.
    """

    events: list[Event]
    queue: Queue
    stats: EngineStats | None
    ended: bool = False
    hangs: bool = False


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Take no new requests, and end `grace_s` after now at the latest."""

    grace_s: float


class WebNews(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Server-sent events for watcher `number`; none is the end."""

    number: int
    frames: bytes


def make_encoder() -> msgspec.msgpack.Encoder:
    """Counts may be numbers of numpy, which msgspec does not know."""
    return msgspec.msgpack.Encoder(enc_hook=lambda number: number.item())


_Web = WebAsk | WebWatch | WebUnwatch | Announcement | AnswerTimes
ToEngine = Submission | Abort | Ready | _Web
ToApi = PortAnswer | StepNews | Drain | WebNews


def frame(message: bytes) -> bytes:
    """`message` as it is sent."""
    return _LENGTH.pack(len(message)) + message


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None once the other process has closed its end, or has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
