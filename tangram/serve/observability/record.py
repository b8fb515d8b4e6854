"""What happened to one HTTP request, for metrics, log and traces."""

from __future__ import annotations

import logging
import time
import uuid
from asyncio import Task
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tangram.types import DraftedTokens, Event, FinishReason, LostPrefix, Request, Usage

_KEY = "tangram.record"
_TRACE_HEADERS = ("traceparent", "tracestate")
_log = logging.getLogger(__name__)


@dataclass
class Generation:
    """What the engine generates for one HTTP request, and what each choice has received so far.

    It has one of `requests` for each prompt, with the same sampling and options. `admitted_s` and
    `first_token_s` are of the first choice that got there, on the monotonic clock. `failure` is
    the status of an error that ended the answer after it had begun. `losses` are those of prompts,
    by their number.
    """

    response_id: str
    requests: Sequence[Request]
    stream: bool
    explains_reuse: bool = False
    usages: dict[int, Usage] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    admitted_s: float | None = None
    first_token_s: float | None = None
    failure: int | None = None
    losses: dict[int, LostPrefix] = field(default_factory=dict)

    @property
    def first(self) -> Request:
        """The request of the first prompt."""
        return self.requests[0]

    @property
    def choices(self) -> int:
        """How many completions there are: `n` of each prompt."""
        return len(self.requests) * self.first.sampling.n

    def request_of(self, choice: int) -> Request:
        """The request of which `choice` is a completion."""
        return self.requests[choice // self.first.sampling.n]

    def note(self, choice: int, event: Event, now_s: float) -> None:
        """Enter an event of a choice."""
        self.usages[choice] = event.usage
        if event.lost is not None:
            self.losses.setdefault(choice // self.first.sampling.n, event.lost)
        if self.admitted_s is None:
            self.admitted_s = event.admitted_s
        if event.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        if event.finish_reason is not None:
            self.reasons[choice] = event.finish_reason

    @property
    def usage(self) -> Usage:
        """What all choices have used so far.

        A prompt counts once, however many completions it has. Completion tokens and KV bytes count
        for each choice.
        """
        choices = self.usages.values()
        # Of the choices of one prompt, the first is entered last and stays.
        last_to_first = sorted(self.usages.items(), reverse=True)
        firsts = {choice // self.first.sampling.n: usage for choice, usage in last_to_first}
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts.values()),
            completion_tokens=sum(usage.completion_tokens for usage in choices),
            cached_tokens=sum(usage.cached_tokens for usage in firsts.values()),
            kv_bytes=sum(usage.kv_bytes for usage in choices),
            kv_bytes_uncompressed=sum(usage.kv_bytes_uncompressed for usage in choices),
            drafted=_add([usage.drafted for usage in choices if usage.drafted is not None]),
        )

    @property
    def lost(self) -> tuple[Request, LostPrefix] | None:
        """The prompt that has lost most, and what; None if none has."""
        losses = [(self.requests[number], lost) for number, lost in self.losses.items()]
        return max(losses, key=lambda pair: pair[1].tokens, default=None)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in their order."""
        return [self.reasons[choice].value for choice in sorted(self.reasons)]


def _add(drafted: Sequence[DraftedTokens]) -> DraftedTokens | None:
    if not drafted:
        return None
    accepted = sum(part.accepted for part in drafted)
    return DraftedTokens(accepted, sum(part.rejected for part in drafted))


@dataclass
class Record:
    """One request.

    `trace_headers` name the trace it belongs to. `generation` is None if it never reached the
    engine. `status` None is a connection that was cut before a response. Times are of the monotonic
    clock; `started_at_ns` is Unix time. It came from `address`. `key_digest` is the SHA-256 of its
    API key, if it needed one; it is only compared. `background` is its work that goes on when the
    response is sent: the request ends with that.
    """

    request_id: str
    method: str
    path: str
    trace_headers: Mapping[str, str]
    started_s: float
    started_at_ns: int
    address: str = ""
    ended_s: float | None = None
    status: int | None = None
    generation: Generation | None = None
    key_digest: bytes | None = field(default=None, repr=False)
    background: Task[Any] | None = None

    @property
    def client(self) -> bytes:
        """Who has sent it: the holder of a key, or on a server without keys an address."""
        return self.address.encode() if self.key_digest is None else self.key_digest

    @property
    def duration_s(self) -> float:
        """From the first byte to its end, or to now."""
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s

    def since_start(self, moment_s: float | None) -> float | None:
        """Seconds from its start to a moment, if that has come."""
        return None if moment_s is None else moment_s - self.started_s


# Receives the record of a request that has ended.
RecordSink = Callable[[Record], None]


def record_in(scope: Scope) -> Record:
    """The record that `RecordRequests` keeps of the request with this ASGI scope."""
    record: Record = scope[_KEY]
    return record


class RecordRequests:
    """The outermost middleware: records every request.

    It gives the record to `sinks` when the request has ended.
    """

    def __init__(self, app: ASGIApp, sinks: Sequence[RecordSink]) -> None:
        self._app, self._sinks = app, sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and watch its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = _begin(scope)

        async def watching_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        finally:
            if record.background is None:
                self._end(record)
            else:
                record.background.add_done_callback(lambda _: self._end(record))

    def _end(self, record: Record) -> None:
        record.ended_s = time.monotonic()
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # an answer that is out is no worse for that
                _log.exception(
                    "request %s was not recorded",
                    record.request_id,
                    extra={"request_id": record.request_id},
                )


def _begin(scope: Scope) -> Record:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    trace = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
    return Record(
        f"req-{uuid.uuid4().hex}",
        scope["method"],
        scope["path"],
        trace,
        time.monotonic(),
        time.time_ns(),
        scope["client"][0] if scope.get("client") else "",
    )
