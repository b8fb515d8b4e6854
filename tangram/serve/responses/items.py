"""The input items of POST /v1/responses.

Messages, thoughts, calls and their results, and stored items by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, ValidationInfo, WithJsonSchema

from tangram.serve.bodies.body import ALTERNATIVE, Body, Label, Text, TypeOnly
from tangram.serve.bodies.structured import INPUT
from tangram.serve.chat.chat_messages import (
    Arguments,
    CalledName,
    CallId,
    describe_parts,
    text_of_parts,
    write_call,
)

Status = Literal["completed", "incomplete", "in_progress"]


def _join(*types: str) -> BeforeValidator:
    """Joins parts of these types into one string; the endpoint's own answers have such parts."""

    def join_parts(content: Any, info: ValidationInfo) -> Any:
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            if isinstance(part, dict) and part.get("type") in types:
                # Answers have empty annotations and logprobs, which can be dropped.
                kept = {name: value for name, value in part.items() if value not in (None, [])}
                part = kept | {"type": "text"}
            parts.append(part)
        return text_of_parts(parts, info)

    return BeforeValidator(join_parts)


# Types of what tools of other servers leave in a conversation.
_OTHER = (
    r"^(?!(?:function|custom_tool)_call(?:_output)?$)"
    r"(?:[a-z_]{1,48}_call(?:_output)?|mcp_[a-z_]{1,48})$"
)
_PARTS, _THOUGHTS = ("input_text", "output_text"), ("reasoning_text", "summary_text")
_Content = Annotated[Text, _join(*_PARTS), describe_parts(*_PARTS, "text")]
_Thought = Annotated[Text, _join(*_THOUGHTS), describe_parts(*_THOUGHTS, "text")]


class InputMessage(Body):
    """One message; `id` and `status` are set in an answer that is sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    id: Label | None = None
    status: Status | None = None
    phase: Label | None = None


class ReasoningItem(Body):
    """A thought that an earlier answer had."""

    refused = {"encrypted_content": ()}  # noqa: RUF012 (a ClassVar of the base)
    type: Literal["reasoning"]
    content: _Thought = ""
    summary: _Thought = ""
    id: Label | None = None
    status: Status | None = None


class FunctionCallItem(Body):
    """A function call that an earlier answer had."""

    refused = {"async": (False,), "async_": (), "caller": (), "namespace": ()}  # noqa: RUF012
    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: Arguments
    id: Label | None = None
    status: Status | None = None

    def call(self) -> dict[str, Any]:
        """The call as it is in a chat message."""
        return write_call(self.call_id, self.name, self.arguments)


class FunctionOutputItem(Body):
    """The result of a call."""

    refused = {"caller": (), "name": (), "namespace": ()}  # noqa: RUF012
    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content
    id: Label | None = None
    status: Status | None = None


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: Label


class CustomCallItem(Body):
    """A call of a custom tool that an earlier answer had."""

    refused = {"caller": (), "namespace": ()}  # noqa: RUF012
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: CalledName
    input: Text
    id: Label | None = None
    status: Status | None = None

    def call(self) -> dict[str, Any]:
        """The call as it is in a chat message."""
        return write_call(self.call_id, self.name, json.dumps({INPUT: self.input}))


class CustomOutputItem(FunctionOutputItem):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class OtherItem(TypeOnly):
    """What a tool of another server has done: it is left out."""

    type: Annotated[Text, WithJsonSchema({"type": "string", "pattern": _OTHER})]


ITEMS = {
    "message": InputMessage,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "item_reference": ItemReference,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _kind(item: Any) -> str:
    """The tag of an item. An item with a role is a message, whatever its type says."""
    kind = getattr(item, "type", "message")
    if isinstance(item, dict) and "role" not in item:
        given = item.get("type")
        if isinstance(given, str) and given in ITEMS:
            kind = given
        elif isinstance(given, str) and re.fullmatch(_OTHER, given):
            kind = "other"
    elif isinstance(item, OtherItem):
        kind = "other"
    return f"{ALTERNATIVE}{kind}"


Item = Annotated[
    Annotated[InputMessage, Tag(f"{ALTERNATIVE}message")]
    | Annotated[ReasoningItem, Tag(f"{ALTERNATIVE}reasoning")]
    | Annotated[FunctionCallItem, Tag(f"{ALTERNATIVE}function_call")]
    | Annotated[FunctionOutputItem, Tag(f"{ALTERNATIVE}function_call_output")]
    | Annotated[ItemReference, Tag(f"{ALTERNATIVE}item_reference")]
    | Annotated[CustomCallItem, Tag(f"{ALTERNATIVE}custom_tool_call")]
    | Annotated[CustomOutputItem, Tag(f"{ALTERNATIVE}custom_tool_call_output")]
    | Annotated[OtherItem, Tag(f"{ALTERNATIVE}other")],
    Discriminator(_kind),
]


def write_item(item: Item, made_id: str) -> dict[str, Any]:
    """The item as clients are shown it: with an id, perhaps `made_id`, and with texts as parts."""
    written = item.model_dump(exclude_none=True)
    prefix = _PREFIXES.get(item.type, "item")
    if isinstance(item, InputMessage):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part |= {"type": "output_text", "annotations": []}
        written["content"] = [part]
    if isinstance(item, ReasoningItem):
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
            text = written[name]
            written[name] = [{"type": kind, "text": text}] if text else []
    return {"id": f"{prefix}_{made_id}", "status": "completed"} | written


def conversation(items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """The items as chat messages. A thought, a text and calls in sequence become one message."""
    turn: dict[str, Any] = {}
    for item in items:
        if isinstance(item, OtherItem):
            continue
        part = _of_assistant(item)
        if turn and (part is None or _goes_on(turn, part)):
            yield _message(turn)
            turn = {}
        if part is None:
            yield _of_others(item)
        elif "tool_calls" in part:
            turn["tool_calls"] = [*turn.get("tool_calls", []), *part["tool_calls"]]
        else:
            turn |= part
    if turn:
        yield _message(turn)


def _of_assistant(item: Item) -> dict[str, Any] | None:
    """What an item adds to a message of the assistant; None for items of others."""
    if isinstance(item, ReasoningItem):
        return {"reasoning_content": item.content or item.summary}
    if isinstance(item, (FunctionCallItem, CustomCallItem)):
        return {"tool_calls": [item.call()]}
    if isinstance(item, InputMessage) and item.role == "assistant":
        return {"content": item.content}
    return None


def _goes_on(turn: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether `part` begins a new message: thoughts come first, then text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    last = max(order.index(name) for name in turn)
    first = order.index(next(iter(part)))
    return first < last or (first == last and "tool_calls" not in part)


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": ""} | turn


def _of_others(item: Item) -> dict[str, Any]:
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    assert isinstance(item, InputMessage)
    return {"role": item.role, "content": item.content}
