"""POST /v1/responses: a conversation in, one answer out, whole or as the events of OpenAI's client.

It is the chat endpoint in other words: what it says becomes a `ChatRequest`. Nothing is stored: a
conversation goes on by sending all of it again, which the prefix cache makes cheap.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from tangram.errors import RequestError
from tangram.serve.api_errors import ApiError, of_validation
from tangram.serve.body import texts_in
from tangram.serve.bridge import EventStream, Job
from tangram.serve.outputs import Output, Told
from tangram.serve.preparation import unless_disconnected
from tangram.serve.reading import ReadChoice
from tangram.serve.record import record_of
from tangram.serve.replies import Json
from tangram.serve.responses_schema import ResponsesRequest
from tangram.serve.schema import ChatRequest
from tangram.serve.sending import EventSource
from tangram.serve.service import Asked, Service
from tangram.types import Event, FinishReason, Usage

# What the chat endpoint calls differently, by the beginnings of names.
_OTHER_NAMES = {
    r"(messages|prompt)\b.*": "input",
    r"max_(completion_)?tokens": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format\.json_schema": "text.format",
    r"response_format": "text.format",
    r"reasoning_effort": "reasoning",
    r"verbosity": "text",
}

# What the first events of a stream have in place of what is longer.
_LONG_CHARACTERS = 16_384
_LEFT_OUT: Json = {"instructions": None, "tools": []}


async def respond(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """The answer to `body`; raises `RequestError` and `ApiError` with the field names of this
    endpoint.
    """
    try:
        chat = await asyncio.to_thread(body.chat)  # of thousands of messages it takes a while
        asked = await service.preparation.of(request, service.ask, chat, "input")
        identity = f"resp_{uuid.uuid4().hex}"
        job = Job(
            identity,
            [asked.prompt],
            body.sampling(),
            body.kv_retention,
            body.cache_salt,
            body.stream,
            asked.grammar,
            record_of(request),
            asked.marks,
        )
        events = service.open(job)
    except ValidationError as error:
        raise _rename_fields(of_validation(error)) from error
    except RequestError as error:
        name = _name_here(error.field)
        also = "; the instructions count, too" if name == "input" and body.instructions else ""
        raise RequestError(str(error).replace(error.field, name) + also, name) from error
    answer = _Answer(body, chat, asked, identity, service.model)
    if body.stream:
        return EventSource(_frames(events, answer), events)
    try:
        return JSONResponse(await unless_disconnected(request, _whole(events, answer)))
    finally:
        events.close()


def _rename_fields(error: ApiError) -> ApiError:
    name = None if error.param is None else _name_here(error.param)
    message = str(error).replace(error.param or "", name or "") if error.param else str(error)
    return ApiError(error.status, message, param=name, code=error.code)


def _name_here(field: str) -> str:
    for name, here in _OTHER_NAMES.items():
        if re.match(name, field):
            return re.sub(f"^{name}", here, field)
    return field


async def _whole(events: EventStream, answer: _Answer) -> Json:
    async for _, event in events:
        for _ in answer.add(event):
            pass
    return answer.json()


class _Answer:
    """One response as far as it has come."""

    def __init__(
        self, body: ResponsesRequest, chat: ChatRequest, asked: Asked, identity: str, model: str
    ) -> None:
        self._body, self._id, self._model, self._created_s = body, identity, model, int(time.time())
        reader = asked.form.reader(chat.offered)
        self._choice = None if reader is None else ReadChoice(reader())
        self._output = Output()
        self._usage, self._reason = None, None

    _usage: Usage | None
    _reason: FinishReason | None

    def add(self, event: Event) -> list[Told]:
        """Append an event of the engine: what is to be told of it."""
        self._usage, self._reason = event.usage, event.finish_reason
        parts = [event.text] if self._choice is None else self._choice.take(event)
        told = list(self._output.add(parts))
        return told if self._reason is None else [*told, *self._output.finish(self.status)]

    @property
    def status(self) -> str:
        """`incomplete` is an answer that its limit has ended."""
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def json(self) -> Json:
        """The response object."""
        body, length = self._body, self._reason is FinishReason.LENGTH
        choice = body.tool_choice
        named = choice if isinstance(choice, str) else {"type": "function", "name": choice.name}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "model": self._model,
            "status": self.status,
            "error": None,
            "background": False,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": [] if self._reason is None else self._output.items,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": self._text(),
            "tools": [tool.model_dump() for tool in body.tools],
            "tool_choice": named if body.tools else "none",
            "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls,
            "truncation": "disabled",
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "metadata": {},
            "store": False,
            "user": body.user,
            "usage": self._usage_json(),
        }

    def begin(self) -> Json:
        """The response object before there is an answer: what is long of the request comes once, at
        the end.
        """
        whole = self.json()
        for name, nothing in _LEFT_OUT.items():
            if sum(map(len, texts_in(whole[name]))) > _LONG_CHARACTERS:
                whole[name] = nothing
        return whole

    def _text(self) -> Json:
        text = self._body.text
        found = (
            None
            if text.format is None
            else text.format.model_dump(by_alias=True, exclude_none=True)
        )
        if found is not None and found["type"] != "json_schema":
            found = {"type": found["type"]}
        verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
        return {"format": found or {"type": "text"}, **verbosity}

    def _usage_json(self) -> Json | None:
        usage = self._usage
        if usage is None or self._reason is None:
            return None
        thought = 0 if self._choice is None else self._choice.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "kv_bytes": usage.kv_bytes,
            "kv_bytes_uncompressed": usage.kv_bytes_uncompressed,
        }


async def _frames(events: EventStream, answer: _Answer) -> AsyncIterator[str]:
    """The server-sent events, numbered from 0."""
    number = 0
    async for kind, fields in _stream(events, answer):
        data = json.dumps({"type": kind, "sequence_number": number, **fields}, ensure_ascii=False)
        yield f"event: {kind}\ndata: {data}\n\n"
        number += 1


async def _stream(events: EventStream, answer: _Answer) -> AsyncIterator[Told]:
    for kind in ("response.created", "response.in_progress"):
        yield kind, {"response": answer.begin()}
    try:
        async for _, event in events:
            for told in answer.add(event):
                yield told
    except ApiError as error:
        said = error.body()["error"]
        yield "error", {"code": said["code"], "message": said["message"], "param": said["param"]}
        return
    yield f"response.{answer.status}", {"response": answer.json()}
