"""The messages of POST /v1/messages: texts, thoughts, tool calls and their results, as blocks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from tangram.serve.bodies.body import ALTERNATIVE, Body, Json, Note, OrText, Text, name_alternative
from tangram.serve.bodies.unsupported import wrong_field
from tangram.serve.chat.chat_messages import CalledName, CallId, check_arguments, write_call

_ROLES = {
    "text": ("user", "assistant", "system"),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}


def as_blocks(content: Any, *, kinds: Collection[str] = _ROLES) -> Any:
    """A text as a block of its own. Raises `ValueError` naming a type that is none of `kinds`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"blocks of type {kind[:64]!r} are not supported: this model reads text, and "
                "calls of tools that the client runs"
            )
    return content


class TextBlock(Body):
    """A text."""

    refused = {"citations": ([],)}  # noqa: RUF012 (a ClassVar of the base)
    type: Literal["text"]
    text: Text
    cache_control: Note = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(as_blocks), OrText()]


def join_texts(blocks: Iterable[TextBlock]) -> str:
    """Blocks as one text, in lines as the parts of chat messages are."""
    return "\n".join(block.text for block in blocks)


class ThinkingBlock(Body):
    """A thought that an earlier answer had; nothing is signed here."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(Body):
    """A thought that only another server can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Body):
    """A tool call that an earlier answer had."""

    refused = {"caller": ({"type": "direct"},), "toolset_name": ()}  # noqa: RUF012
    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: Annotated[dict[str, Any], AfterValidator(check_arguments)]
    cache_control: Note = None

    def call(self) -> Json:
        """The call as it is in a chat message."""
        return write_call(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


class ToolReferenceBlock(Body):
    """A tool with `defer_loading`. The model reads its definition here, where it is named first."""

    type: Literal["tool_reference"]
    tool_name: CalledName
    cache_control: Note = None


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag(f"{ALTERNATIVE}text")]
    | Annotated[ToolReferenceBlock, Tag(f"{ALTERNATIVE}tool_reference")],
    Discriminator(lambda value: name_alternative(value, ("tool_reference",), "text")),
]
_ResultBlocks = Annotated[
    list[_ResultBlock],
    Field(fail_fast=True),
    BeforeValidator(partial(as_blocks, kinds={*_ROLES, "tool_reference"})),
    OrText(),
]


class ToolResultBlock(Body):
    """The result of a call. With `is_error` the model reads `Error: ` before it."""

    refused = {"toolset_name": ()}  # noqa: RUF012
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: _ResultBlocks = []  # noqa: RUF012 (pydantic copies it)
    is_error: bool = False
    cache_control: Note = None

    @property
    def references(self) -> list[str]:
        """The tools that it names."""
        return [block.tool_name for block in self.content if isinstance(block, ToolReferenceBlock)]

    def message(self, unread: dict[str, str]) -> Json:
        """The result as a chat message. It takes the definitions of tools out of those `unread`."""
        texts = (
            block.text
            if isinstance(block, TextBlock)
            else unread.pop(block.tool_name, block.tool_name)
            for block in self.content
        )
        joined = "\n".join(texts)
        content = f"{'Error: ' if self.is_error else ''}{joined}"
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


# `as_blocks` has refused other types.
_AnyBlock = Annotated[
    Annotated[TextBlock, Tag(f"{ALTERNATIVE}text")]
    | Annotated[ThinkingBlock, Tag(f"{ALTERNATIVE}thinking")]
    | Annotated[RedactedThinkingBlock, Tag(f"{ALTERNATIVE}redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(f"{ALTERNATIVE}tool_use")]
    | Annotated[ToolResultBlock, Tag(f"{ALTERNATIVE}tool_result")],
    Discriminator(lambda value: name_alternative(value, _ROLES, "text")),
]


class InputTurn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_AnyBlock], Field(fail_fast=True), BeforeValidator(as_blocks), OrText()]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        for block in self.content:
            if self.role not in _ROLES[block.type]:
                there = " and ".join(f"'{role}'" for role in _ROLES[block.type])
                message = f"blocks of type '{block.type}' belong in messages of {there}"
                raise wrong_field("content", f"{message}, not of '{self.role}'")
        return self


def references_in(turns: Iterable[InputTurn]) -> set[str]:
    """The tools that results of the turns name."""
    blocks = (block for turn in turns for block in turn.content)
    results = (block for block in blocks if isinstance(block, ToolResultBlock))
    return {name for result in results for name in result.references}


def conversation_of(turns: Iterable[InputTurn], definitions: Mapping[str, str]) -> Iterator[Json]:
    """The turns as chat messages. Turns of the same role are one; a result is a message.

    It has the one of `definitions` that it is the first to name.
    """
    unread = dict(definitions)
    for role, group in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        if role == "assistant":
            yield _answer(blocks)
            continue
        for is_result, run in groupby(blocks, key=lambda block: block.type == "tool_result"):
            if is_result:
                results = (block for block in run if isinstance(block, ToolResultBlock))
                yield from (result.message(unread) for result in results)
            else:
                texts = [block for block in run if isinstance(block, TextBlock)]
                yield {"role": role, "content": join_texts(texts)}


def _answer(blocks: Sequence[_AnyBlock]) -> Json:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block.call() for block in blocks if isinstance(block, ToolUseBlock)]
    message: Json = {"role": "assistant", "content": join_texts(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})
