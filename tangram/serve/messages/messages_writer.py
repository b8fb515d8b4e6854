"""Answers of POST /v1/messages: the message object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from tangram.serve.answers.answer import (
    AnswerEvent,
    AnswerUsage,
    Delta,
    End,
    Failure,
    Writer,
    write_event,
)
from tangram.serve.bodies.body import Json
from tangram.serve.formats.calls import ArgumentText, Call
from tangram.serve.formats.thoughts import Part, Thought
from tangram.serve.messages.messages_schema import MessagesRequest

# The type of a stream event, and its fields.
BlockEvent = tuple[str, Json]
# Not empty: clients drop thoughts without one, and then the next prompt has another prefix.
_SIGNATURE = "unsigned"
_TEXT, _THOUGHT, _CALL = "text", "thinking", "tool_use"
_EMPTY: dict[str, Json] = {
    _TEXT: {"type": _TEXT, "text": ""},
    _THOUGHT: {"type": _THOUGHT, "thinking": "", "signature": ""},
}


class Blocks:
    """The events of content blocks. The first part of a block opens it."""

    def __init__(self, *, hides_thoughts: bool) -> None:
        self._hides_thoughts = hides_thoughts
        self._opened, self._open = 0, ""  # how many, and the type of the one that grows

    def add(self, parts: Iterable[Part]) -> Iterator[BlockEvent]:
        """The events for `parts`."""
        for part in parts:
            if isinstance(part, Call):
                block = {"type": _CALL, "id": part.id, "name": part.name, "input": {}}
                yield from self.close()
                yield from self._begin(_CALL, block)
            elif isinstance(part, ArgumentText):
                yield self._grow({"type": "input_json_delta", "partial_json": part.text})
                if part.last:
                    yield from self.close()
            elif isinstance(part, Thought):
                yield from self._begin(_THOUGHT, _EMPTY[_THOUGHT])
                if not self._hides_thoughts:
                    yield self._grow({"type": "thinking_delta", "thinking": part.text})
            elif part:
                yield from self._begin(_TEXT, _EMPTY[_TEXT])
                yield self._grow({"type": "text_delta", "text": part})

    def close(self) -> Iterator[BlockEvent]:
        """The events that end the block that is open, if one is."""
        if self._open == _THOUGHT:
            yield self._grow({"type": "signature_delta", "signature": _SIGNATURE})
        if self._open:
            yield "content_block_stop", {"index": self._opened - 1}
        self._open = ""

    def _begin(self, kind: str, block: Json) -> Iterator[BlockEvent]:
        """Open a block, unless one of this kind is open."""
        if self._open == kind:
            return
        yield from self.close()
        self._open, self._opened = kind, self._opened + 1
        yield "content_block_start", {"index": self._opened - 1, "content_block": block}

    def _grow(self, delta: Json) -> BlockEvent:
        return "content_block_delta", {"index": self._opened - 1, "delta": delta}


class MessagesWriter(Writer):
    """Spells the answer of `model` to `body`; errors in it name the request `request_id`."""

    def __init__(
        self,
        body: MessagesRequest,
        message_id: str,
        model: str,
        request_id: str,
        warnings: Sequence[str],
    ) -> None:
        self._body, self._request_id = body, request_id
        self._head: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        if warnings:
            self._head["warnings"] = list(warnings)
        self._blocks = Blocks(hides_thoughts=body.hides_thoughts)
        self._content: list[Json] = []
        self._pieces: list[str] = []  # of the input of the block that is open
        self._last: Delta | None = None

    def begin(self) -> Iterator[str]:
        """Nothing: the first event says how much of the prompt was cached."""
        return iter(())

    def write(self, event: AnswerEvent) -> Iterator[str]:
        """The events of the message and of its blocks."""
        match event:
            case Delta():
                if event.is_first:
                    opening = self._make_message(event.usage) | _NOT_ENDED
                    yield write_event("message_start", {"message": opening})
                    yield write_event("ping", {})
                for kind, fields in self._take(event):
                    yield write_event(kind, fields)
            case Failure(error):
                yield write_event("error", error.messages_body(self._request_id))
            case End(usage):
                fields = {"delta": self._make_end(usage), "usage": _write_usage(usage)}
                yield write_event("message_delta", fields)
                yield write_event("message_stop", {})

    def ping(self) -> str:
        """A comment before the message, then the event that clients know."""
        return ": ping\n\n" if self._last is None else write_event("ping", {})

    def gather(self, delta: Delta) -> None:
        """Add it to the content."""
        for kind, fields in self._take(delta):
            if kind == "content_block_start":
                self._content.append(dict(fields["content_block"]))
                self._pieces = []
            elif kind == "content_block_delta":
                self._pieces.append(fields["delta"].get("partial_json", ""))
                _add(self._content[-1], fields["delta"])
            elif self._content[-1]["type"] == _CALL:
                self._content[-1]["input"] = _read_input("".join(self._pieces))

    def write_whole(self, usage: AnswerUsage) -> Json:
        """The message object."""
        return self._make_message(usage) | self._make_end(usage)

    def _take(self, delta: Delta) -> Iterator[BlockEvent]:
        self._last = delta
        yield from self._blocks.add(delta.parts)
        if delta.finish is not None:
            yield from self._blocks.close()

    def _make_message(self, usage: AnswerUsage) -> Json:
        return self._head | {"content": self._content, "usage": _write_usage(usage)}

    def _make_end(self, usage: AnswerUsage) -> Json:
        """Why the answer has ended. The context may be full before `max_tokens` are written."""
        finish = None if self._last is None else self._last.finish
        found = None if self._last is None else self._last.stop_string
        if finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish == "length":
            at_limit = usage.engine.completion_tokens >= self._body.max_tokens
            reason = "max_tokens" if at_limit else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        reason = "end_turn" if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}


_NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}


def _add(block: Json, delta: Json) -> None:
    """Add a delta to the block that it belongs to."""
    match delta:
        case {"type": "signature_delta", "signature": text}:
            block["signature"] = text
        case {"type": "thinking_delta", "thinking": text}:
            block["thinking"] += text
        case {"type": "text_delta", "text": text}:
            block["text"] += text


def _read_input(text: str) -> Any:
    """The input of a call, as Anthropic's clients read a stream: of one that was cut what came."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


def _write_usage(usage: AnswerUsage) -> Json:
    """`input_tokens` leaves out what was cached. Writing to the cache costs nothing."""
    counted = usage.engine
    reuse = {} if usage.explain is None else {"reuse": usage.explain()}
    return reuse | {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "kv_bytes": counted.kv_bytes,
        "kv_bytes_uncompressed": counted.kv_bytes_uncompressed,
    }
