"""POST /v1/responses for text: a conversation in, one answer out, whole or as the events of OpenAI's client.

Nothing is stored: a conversation goes on by sending all of it again, which the prefix cache makes cheap.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field, PositiveInt

from tangram.errors import RequestError
from tangram.serve.body import Body, Salt, Text
from tangram.serve.bridge import EventStream, Job
from tangram.serve.errors import ApiError
from tangram.serve.messages import MAX_MESSAGES, text_of_parts
from tangram.serve.preparation import unless_disconnected
from tangram.serve.record import record_of
from tangram.serve.replies import Json
from tangram.serve.sending import EventSource
from tangram.serve.service import Service
from tangram.serve.unsupported import RESPONSES
from tangram.types import FinishReason, SamplingParams, Usage

_PART_TYPES = ("input_text", "output_text")
_OTHER_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}


def _content_text(content: Any) -> Any:
    """Parts of this endpoint, and those of its own answers, as one string; annotations are never there to be lost."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _PART_TYPES:
            kept = {name: value for name, value in part.items() if value not in (None, [])}
            part = kept | {"type": "text"}
        parts.append(part)
    return text_of_parts(parts)


class InputMessage(Body):
    """One message; `id` and `status` are those of an answer that is sent back."""

    refused = {"phase": ()}  # noqa: RUF012 (a ClassVar of the base)
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_content_text)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    refused = RESPONSES
    model: str
    input: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_as_messages),
    ]
    instructions: Text | None = Field(default=None, description="a system message before the input")
    max_output_tokens: PositiveInt | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    kv_retention: float | None = Field(default=None, description="fraction of the KV cache to keep, (0, 1]")
    cache_salt: Salt = ""
    user: str | None = Field(default=None, description="a label, without effect")
    safety_identifier: str | None = Field(default=None, description="a label, without effect")
    prompt_cache_key: str | None = Field(default=None, max_length=1024, description="a label, without effect")

    def messages(self) -> list[dict[str, str]]:
        """The conversation for the chat template."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*first, *(message.for_template() for message in self.input)]

    def sampling(self) -> SamplingParams:
        """Raises `RequestError` naming the first value that is out of range."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_output_tokens)


async def respond(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """The answer to `body`; raises `RequestError` and `ApiError` with the field names of this endpoint."""
    try:
        prompt = await service.preparation.of(request, service.chat_prompt, body.messages(), "input")
        identity = f"resp_{uuid.uuid4().hex}"
        sampling, record = body.sampling(), record_of(request)
        events = service.open(
            Job(identity, [prompt], sampling, body.kv_retention, body.cache_salt, body.stream, record=record)
        )  # fmt: skip
    except RequestError as error:
        name = _OTHER_NAMES.get(error.field, error.field)
        raise RequestError(str(error).replace(error.field, name), name) from error
    answer = _Answer(body, identity, service.model)
    if body.stream:
        return EventSource(_frames(events, answer), events)
    try:
        return JSONResponse(await unless_disconnected(request, _whole(events, answer)))
    finally:
        events.close()


async def _whole(events: EventStream, answer: _Answer) -> Json:
    async for _, event in events:
        answer.add(event.text, event.usage, event.finish_reason)
    return answer.json()


class _Answer:
    """One response as far as it has come."""

    def __init__(self, body: ResponsesRequest, identity: str, model: str) -> None:
        self._body, self._id, self._model, self._created_s = body, identity, model, int(time.time())
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.text, self._usage, self._reason = "", None, None

    text: str
    _usage: Usage | None
    _reason: FinishReason | None

    def add(self, text: str, usage: Usage, reason: FinishReason | None) -> None:
        """Append an event."""
        self.text, self._usage, self._reason = self.text + text, usage, reason

    @property
    def status(self) -> str:
        """`incomplete` is an answer that its limit has ended."""
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def part(self) -> Json:
        """The answer's only part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, *, empty: bool = False) -> Json:
        """The answer's only output."""
        content = [] if empty else [self.part()]
        return {"type": "message", "id": self.item_id, "role": "assistant", "status": self.status, "content": content}

    def json(self) -> Json:
        """The response object."""
        body, length = self._body, self._reason is FinishReason.LENGTH
        return {
            "id": self._id, "object": "response", "created_at": self._created_s, "model": self._model,
            "status": self.status, "error": None, "background": False,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "output": [] if self._reason is None else [self.item()],
            "temperature": body.temperature, "top_p": body.top_p, "text": {"format": {"type": "text"}},
            "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "truncation": "disabled",
            "previous_response_id": None, "reasoning": None, "metadata": {}, "store": False, "user": body.user,
            "usage": None if self._reason is None or self._usage is None else _usage_json(self._usage),
        }  # fmt: skip


def _usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
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


async def _stream(events: EventStream, answer: _Answer) -> AsyncIterator[tuple[str, Json]]:
    item, part = {"output_index": 0}, {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
    for kind in ("response.created", "response.in_progress"):
        yield kind, {"response": answer.json()}
    yield "response.output_item.added", {**item, "item": answer.item(empty=True)}
    yield "response.content_part.added", {**part, "part": answer.part()}
    try:
        async for _, event in events:
            answer.add(event.text, event.usage, event.finish_reason)
            if event.text:
                yield "response.output_text.delta", {**part, "delta": event.text, "logprobs": []}
    except ApiError as error:
        told = error.body()["error"]
        yield "error", {"code": told["code"], "message": told["message"], "param": told["param"]}
        return
    yield "response.output_text.done", {**part, "text": answer.text, "logprobs": []}
    yield "response.content_part.done", {**part, "part": answer.part()}
    yield "response.output_item.done", {**item, "item": answer.item()}
    yield f"response.{answer.status}", {"response": answer.json()}
