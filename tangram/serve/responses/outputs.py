"""The output items of POST /v1/responses, with the stream events that describe them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator

from tangram.serve.bodies.body import Json
from tangram.serve.formats.calls import ArgumentText, Call
from tangram.serve.formats.thoughts import Part, Thought

# The type of a stream event, and its fields.
OutputEvent = tuple[str, Json]
_TEXT, _THOUGHT = "output_text", "reasoning_text"
_FUNCTION, _CUSTOM = "function_call_arguments", "custom_tool_call_input"

# Type, beginning of ids and field of a call's item: of a function, and of a custom tool.
_CALLS = (("function_call", "fc", "arguments"), ("custom_tool_call", "ctc", "input"))


class Output:
    """The items so far: thoughts, texts and calls. The first part of an item creates it."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open = ""  # the type of the part that the last item is being given
        self._pieces: list[str] = []  # of the arguments, if that is a call

    def add(self, parts: Iterable[Part]) -> Iterator[OutputEvent]:
        """Append `parts`; returns the events for them."""
        for part in parts:
            if isinstance(part, Call):
                yield from self._close("completed")
                yield from self._begin_call(part)
            elif isinstance(part, ArgumentText):
                self._pieces.append(part.text)
                kind = _CUSTOM if part.custom else _FUNCTION
                yield f"response.{kind}.delta", {**self._item_place, "delta": part.text}
                if part.last:
                    yield from self._end_call("completed")
            elif isinstance(part, Thought):
                yield from self._grow(_THOUGHT, part.text)
            else:
                yield from self._grow(_TEXT, part)

    def finish(self, status: str) -> Iterator[OutputEvent]:
        """Close the last item; returns the events. An empty answer has an empty message."""
        if not self.items:
            yield from self._begin(_TEXT)
        yield from self._close(status)

    def _grow(self, kind: str, text: str) -> Iterator[OutputEvent]:
        if not text:
            return
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._part["text"] += text
        logprobs: Json = {"logprobs": []} if kind == _TEXT else {}
        yield f"response.{kind}.delta", {**self._place, "delta": text, **logprobs}

    def _begin(self, kind: str) -> Iterator[OutputEvent]:
        self._open = kind
        self.items.append(_make_item(kind))
        yield "response.output_item.added", self._item()
        notes: Json = {"annotations": [], "logprobs": []} if kind == _TEXT else {}
        self.items[-1]["content"].append({"type": kind, "text": "", **notes})
        yield "response.content_part.added", {**self._place, "part": dict(self._part)}

    def _close(self, status: str) -> Iterator[OutputEvent]:
        if self._open in (_FUNCTION, _CUSTOM):
            yield from self._end_call("incomplete")
        kind, self._open = self._open, ""
        if not kind:
            return
        logprobs: Json = {"logprobs": []} if kind == _TEXT else {}
        yield f"response.{kind}.done", {**self._place, "text": self._part["text"], **logprobs}
        yield "response.content_part.done", {**self._place, "part": dict(self._part)}
        self.items[-1]["status"] = status
        yield "response.output_item.done", self._item()

    def _begin_call(self, call: Call) -> Iterator[OutputEvent]:
        kind, prefix, given = _CALLS[call.custom]
        item: Json = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "call_id": call.id}
        item |= {"name": call.name, given: "", "status": "in_progress"}
        self.items.append(item)
        self._open, self._pieces = _CUSTOM if call.custom else _FUNCTION, []
        yield "response.output_item.added", self._item()

    def _end_call(self, status: str) -> Iterator[OutputEvent]:
        item, kind, self._open = self.items[-1], self._open, ""
        _, _, given = _CALLS[kind == _CUSTOM]
        item |= {given: "".join(self._pieces), "status": status}
        named = {} if kind == _CUSTOM else {"name": item["name"]}
        yield f"response.{kind}.done", {**self._item_place, **named, given: item[given]}
        yield "response.output_item.done", self._item()

    @property
    def _item_place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part(self) -> Json:
        part: Json = self.items[-1]["content"][0]
        return part

    @property
    def _place(self) -> Json:
        return {**self._item_place, "content_index": 0}

    def _item(self) -> Json:
        """The event fields of the last item, as it is now."""
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"output_index": len(self.items) - 1, "item": item}


def _make_item(kind: str) -> Json:
    """A new item, whose part is of this kind."""
    identity, opened = uuid.uuid4().hex, {"status": "in_progress", "content": []}
    if kind == _TEXT:
        return {"type": "message", "id": f"msg_{identity}", "role": "assistant", **opened}
    return {"type": "reasoning", "id": f"rs_{identity}", "summary": [], **opened}
