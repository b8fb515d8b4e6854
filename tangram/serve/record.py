"""One HTTP request from the first byte to the last of its answer: what metrics, log and traces tell
of it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tangram.types import Event, FinishReason, SamplingParams, Usage

_KEY = "tangram.record"
_TRACE_HEADERS = ("traceparent", "tracestate")
_log = logging.getLogger(__name__)


@dataclass
class Generation:
    """What a request asked of the engine, and what came of it so far, by choice.

    `admitted_s` and `first_token_s`, of the monotonic clock, are those of the choice that came
    first. `failure` is the status of an error that ended it after its answer had begun.
    """

    response_id: str
    sampling: SamplingParams
    kv_retention: float | None
    stream: bool
    usages: dict[int, Usage] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    admitted_s: float | None = None
    first_token_s: float | None = None
    failure: int | None = None

    def note(self, choice: int, event: Event, now_s: float) -> None:
        """Enter an event of a choice."""
        self.usages[choice] = event.usage
        if self.admitted_s is None:
            self.admitted_s = event.admitted_s
        if event.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        if event.finish_reason is not None:
            self.reasons[choice] = event.finish_reason

    @property
    def _prompts(self) -> list[Usage]:
        """A prompt counts once, however many completions it has."""
        by_prompt = {
            choice // self.sampling.n: usage
            for choice, usage in sorted(self.usages.items(), reverse=True)
        }
        return list(by_prompt.values())

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts that the engine has begun."""
        return sum(usage.prompt_tokens for usage in self._prompts)

    @property
    def cached_tokens(self) -> int:
        """Those of them that the prefix cache had."""
        return sum(usage.cached_tokens for usage in self._prompts)

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(usage.completion_tokens for usage in self.usages.values())

    @property
    def kv_bytes(self) -> int:
        """Held by all choices, each at its last token."""
        return sum(usage.kv_bytes for usage in self.usages.values())

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in their order."""
        return [self.reasons[choice].value for choice in sorted(self.reasons)]


@dataclass
class Record:
    """One request. `trace_headers` are those that name the trace it belongs to; `generation` is
    None for requests that never reached the engine; `status` None is a connection that was cut
    before an answer. Times are of the monotonic clock, `started_at_ns` of the world's.
    """

    request_id: str
    method: str
    path: str
    trace_headers: Mapping[str, str]
    started_s: float
    started_at_ns: int
    ended_s: float | None = None
    status: int | None = None
    generation: Generation | None = None

    @property
    def duration_s(self) -> float:
        """From the first byte to the last, or to now."""
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s

    def since_start(self, moment_s: float | None) -> float | None:
        """Seconds from its start to a moment that may never have come."""
        return None if moment_s is None else moment_s - self.started_s


# Whoever wants to know of a request that is over.
RecordSink = Callable[[Record], None]


def record_of(request: Request) -> Record:
    """The record that `RecordRequests` keeps of `request`."""
    return record_in(request.scope)


def record_in(scope: Scope) -> Record:
    """The record of the request with this ASGI scope."""
    record: Record = scope[_KEY]
    return record


class RecordRequests:
    """The outermost layer: keeps a record of every request and hands it to `sinks` when its answer
    is out.
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
            record.ended_s = time.monotonic()
            self._tell(record)

    def _tell(self, record: Record) -> None:
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # an answer that is out is no worse for that
                _log.exception(
                    "request %s is not told of",
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
    )
