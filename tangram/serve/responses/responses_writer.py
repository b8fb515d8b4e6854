"""Answers of POST /v1/responses: the response object, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tangram.serve.answers.answer import (
    CANCELLED,
    Answer,
    AnswerEvent,
    AnswerUsage,
    Delta,
    End,
    Failure,
    Finish,
    Writer,
    write_event,
)
from tangram.serve.bodies.body import Json, texts_in
from tangram.serve.responses.outputs import Output, OutputEvent
from tangram.serve.responses.response_memory import KeptResponse
from tangram.serve.responses.responses_schema import ResponsesRequest
from tangram.serve.transport.api_errors import ApiError
from tangram.types import SamplingValues

# The first events of a stream leave out what is longer. The last event has it.
_LONG_CHARACTERS = 16_384
_LEFT_OUT: Json = {"instructions": None, "tools": []}


class ResponsesWriter(Writer):
    """Spells the answer `response_id` of `model` to `body`, for which `values` hold.

    It has `warnings` where there are some. It is stored by `kept`.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        response_id: str,
        model: str,
        values: SamplingValues,
        warnings: Sequence[str] = (),
        kept: KeptResponse | None = None,
    ) -> None:
        self._body, self._id, self._model, self._values = body, response_id, model, values
        self._warnings, self._kept = list(warnings), kept
        self._created_s = int(time.time())
        self._output = Output()
        self._finish: Finish | None = None
        self._events_written = 0

    async def open(self, answer: Answer) -> Json | None:
        """Store the response, which has no output yet.

        Returns it if it is to run in the background: what is not stored cannot.
        """
        opening = self._make_response(None) | {"output": []}  # it does not grow with the answer
        if self._kept is not None:
            self._note(await self._kept.begin(opening, answer, self._draft))
        return opening if self._body.background and self._kept is not None else None

    async def settle(self, usage: AnswerUsage) -> None:
        """Store the whole response."""
        if self._kept is not None:
            self._note(await self._kept.end(self._make_response(usage)))

    def _note(self, warning: str | None) -> None:
        if warning is not None:
            self._warnings.append(warning)
            self._kept = None

    def _draft(self, failure: ApiError | None) -> Json:
        """The response as it is now, where nothing more comes."""
        cancelled = failure is None or failure.code == CANCELLED
        error = None if cancelled else {"code": "server_error", "message": str(failure)}
        items = [item | {"status": _name_end(item["status"])} for item in self._output.items]
        ended = {"status": "cancelled" if cancelled else "failed", "error": error, "output": items}
        return self._make_response(None) | ended

    def begin(self) -> Iterator[str]:
        """The response before it has any output, twice."""
        for kind in ("response.created", "response.in_progress"):
            yield self._write_frame(kind, {"response": self._make_opening()})

    def write(self, event: AnswerEvent) -> Iterator[str]:
        """The events of the output, numbered from 0; at the end the whole response."""
        match event:
            case Delta():
                for kind, fields in self._take(event):
                    yield self._write_frame(kind, fields)
            case Failure(error):
                said = error.body()["error"]
                yield self._write_frame("error", {name: said[name] for name in _ERROR_FIELDS})
            case End(usage):
                yield self._write_frame(
                    f"response.{self._status}", {"response": self._make_response(usage)}
                )

    def gather(self, delta: Delta) -> None:
        """Add it to the output."""
        for _ in self._take(delta):
            pass

    def write_whole(self, usage: AnswerUsage) -> Json:
        """The response object."""
        return self._make_response(usage)

    def _take(self, delta: Delta) -> Iterator[OutputEvent]:
        self._finish = delta.finish
        yield from self._output.add(delta.parts)
        if self._finish is not None:
            yield from self._output.finish(self._status)

    @property
    def _status(self) -> str:
        """An answer that its limit has ended is `incomplete`."""
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish == "length" else "completed"

    def _make_response(self, usage: AnswerUsage | None) -> Json:
        """The response object; `usage` is None before there is any output."""
        body, cut = self._body, self._finish == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "model": self._model,
            "status": self._status,
            "error": None,
            "background": body.background,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": self._output.items,
            "temperature": self._values.temperature,
            "top_p": self._values.top_p,
            "text": _write_text_options(body),
            "tools": [tool.model_dump() for tool in body.served_tools],
            "tool_choice": _write_tool_choice(body),
            "parallel_tool_calls": bool(body.served_tools) and body.parallel_tool_calls,
            "truncation": body.truncation,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "metadata": body.metadata,
            "store": self._kept is not None,
            "user": body.user,
            "usage": None if usage is None else _write_usage(usage),
            **({"warnings": self._warnings} if self._warnings else {}),
        }

    def _make_opening(self) -> Json:
        """The response object without output, and without what is long of the request."""
        response = self._make_response(None)
        for name, nothing in _LEFT_OUT.items():
            if sum(map(len, texts_in(response[name]))) > _LONG_CHARACTERS:
                response[name] = nothing
        return response

    def _write_frame(self, kind: str, fields: Json) -> str:
        number = self._events_written
        self._events_written += 1
        return write_event(kind, {"sequence_number": number, **fields})


_ERROR_FIELDS = ("code", "message", "param")


def _name_end(status: str) -> str:
    return "incomplete" if status == "in_progress" else status


def _write_text_options(body: ResponsesRequest) -> Json:
    given, found = body.text.format, None
    if given is not None:
        found = given.model_dump(by_alias=True, exclude_none=True)
        if given.type != "json_schema":
            found = {"type": given.type}
    verbosity = {} if body.text.verbosity is None else {"verbosity": body.text.verbosity}
    return {"format": found or {"type": "text"}, **verbosity}


def _write_tool_choice(body: ResponsesRequest) -> Json | str:
    if not body.served_tools:
        return "none"
    if isinstance(choice := body.tool_choice, str):
        return choice
    kinds = {tool.name: tool.type for tool in body.served_tools}
    return {"type": kinds[choice.name], "name": choice.name}


def _write_usage(usage: AnswerUsage) -> Json:
    counted = usage.engine
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": usage.prompt_details,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "kv_bytes": counted.kv_bytes,
        "kv_bytes_uncompressed": counted.kv_bytes_uncompressed,
    }
