"""The messages of a conversation, with tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from tangram.serve.bodies.body import (
    Body,
    Json,
    Note,
    Text,
    deeper_than,
    describe_object,
    encodable,
    texts_in,
)
from tangram.serve.bodies.unsupported import MESSAGE, without_unknown, wrong_field
from tangram.serve.transport.parsing import has_more_items

MAX_MESSAGES = 4096
_MAX_CALLS = 128
_MAX_ARGUMENT_LEVELS = 64
# In all calls of a conversation together: the template gets them at once.
MAX_ARGUMENT_ITEMS = 2**17
_PART = frozenset({"type", "text"})
_NOTE = "cache_control"


def text_of_parts(content: Any, info: ValidationInfo) -> Any:
    """A message's content as one string: text parts are joined by newlines.

    Raises `ValueError` for other parts.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and isinstance(kind, str):
            raise ValueError(
                f"parts of type {kind!r} are not supported: this model reads text parts only"
            )
        if kind == "text":
            named = {name: value for name, value in part.items() if name != _NOTE}
            part = without_unknown(named, _PART, {}, info.context)
        if kind != "text" or part.keys() != _PART or not isinstance(part["text"], str):
            raise ValueError('a content part must be {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


def describe_parts(*types: str) -> WithJsonSchema:
    """A text, or a list of parts of these types."""
    part = describe_object(type={"enum": list(types)}, text={"type": "string"})
    part["properties"][_NOTE] = {}
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]})


def _an_object(arguments: str) -> str:
    """The same; of arguments that a limit has cut what can be read, as clients read a stream."""
    cut = False
    try:
        try:
            data = json.loads(arguments or "{}")
        except ValueError:
            data, cut = from_json(arguments, allow_partial=True), True
    except (ValueError, RecursionError) as error:
        raise ValueError("must be a JSON object, as text") from error
    if not isinstance(data, dict):
        raise ValueError("must be a JSON object, as text")
    check_arguments(data)
    return json.dumps(data, ensure_ascii=False) if cut else arguments


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same. Raises `ValueError` for arguments that are nested too deep or hold no Unicode."""
    if deeper_than(arguments, _MAX_ARGUMENT_LEVELS):
        raise ValueError(f"is nested in more than {_MAX_ARGUMENT_LEVELS} levels")
    for text in texts_in(arguments):  # an outer text may spell by \\u what it must not hold
        encodable(text)
    return arguments


def few_arguments(calls: Iterable[Any]) -> None:
    """Raise `ValueError` if the arguments of all calls together have too many items."""
    texts = (call.get("arguments") for call in calls if isinstance(call, dict))
    if has_more_items("".join(text for text in texts if isinstance(text, str)), MAX_ARGUMENT_ITEMS):
        message = (
            f"the arguments of calls have more than {MAX_ARGUMENT_ITEMS} objects, lists and texts"
        )
        raise ValueError(f"{message}: send less")


CalledName = Annotated[Text, Field(min_length=1, max_length=64)]
Arguments = Annotated[Text, AfterValidator(_an_object)]
CallId = Annotated[Text, Field(max_length=256)]


class CalledFunction(Body):
    """The name of a function, and its arguments as the text of a JSON object."""

    name: CalledName
    arguments: Arguments
    # The streaming helpers of OpenAI's client for Python leave these two in what users send back.
    parsed_arguments: Any = Field(default=None, description="`arguments` again, without effect")


def write_call(identity: str, name: str, arguments: Any) -> Json:
    """A call as it is in a chat message."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


class CallMessage(Body):
    """A tool call that an earlier answer had."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="the place in a stream, without effect")

    @model_validator(mode="before")
    @classmethod
    def _custom_is_function(cls, call: Any) -> Any:
        match call:
            case {"type": "custom", "custom": {"name": name, "input": str(text)}, **rest}:
                function = {"name": name, "arguments": json.dumps({"input": text})}
                return {**rest, "type": "function", "function": function}
        return call

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: arguments are an object, not text."""
        arguments = json.loads(self.function.arguments or "{}")
        return write_call(self.id, self.function.name, arguments)


class ChatMessage(Body):
    """One message of a conversation.

    `name` goes to the chat template, which may leave it out.
    """

    refused = MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(text_of_parts), describe_parts("text")] = ""
    name: Text | None = None
    cache_control: Note = None
    reasoning_content: Text | None = Field(
        default=None, description="what the model thought before its answer"
    )
    reasoning: Text | None = Field(default=None, description="another name of `reasoning_content`")
    tool_calls: list[CallMessage] = Field(default=[], max_length=_MAX_CALLS, fail_fast=True)
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise wrong_field(
                "tool_calls",
                f"'tool_calls' is allowed in messages of 'assistant', not of {self.role!r}",
            )
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise wrong_field(
                "tool_call_id",
                "'tool_call_id' is required in messages of 'tool' and allowed there only",
            )
        for name in ("reasoning_content", "reasoning"):
            if getattr(self, name) is not None and self.role != "assistant":
                message = f"'{name}' is allowed in messages of 'assistant', not of {self.role!r}"
                raise wrong_field(name, message)
        if None not in (given := {self.reasoning, self.reasoning_content}) and len(given) > 1:
            message = "'reasoning' and 'reasoning_content' differ: send one of them"
            raise wrong_field("reasoning", message)
        said = self.model_fields_set & {"content", "reasoning_content", "reasoning"}
        if not said and not self.tool_calls:
            raise wrong_field("content", "'content' is required in a message without 'tool_calls'")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it. The role `developer` becomes `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content
            if self.reasoning is None
            else self.reasoning,
        }
        return message | {field: value for field, value in given.items() if value is not None}


def _few_arguments(messages: Any) -> Any:
    given = messages if isinstance(messages, list) else []
    called = (message.get("tool_calls") for message in given if isinstance(message, dict))
    calls = chain.from_iterable(calls for calls in called if isinstance(calls, list))
    few_arguments(call.get("function") for call in calls if isinstance(call, dict))
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_few_arguments),
]


class PromptEnd(Body):
    """How the prompt of a conversation ends, as in vLLM.

    With `continue_final_message` the answer goes on with the last message, of `assistant`.
    """

    add_generation_prompt: bool = Field(
        default=True, description="false: without the beginning of an answer"
    )
    continue_final_message: bool = Field(
        default=False, description="the answer goes on with the last message"
    )

    @property
    def template_options(self) -> dict[str, bool]:
        """What the chat template is told of it, besides its defaults."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {} if self.add_generation_prompt else {"add_generation_prompt": False}

    def check_end(self, messages: Sequence[ChatMessage]) -> None:
        """Raise a validation error if the prompt of `messages` cannot end so."""
        if not self.continue_final_message:
            return
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' are true: send one"
            raise wrong_field("continue_final_message", message)
        last = messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.content.strip():
            message = (
                "'continue_final_message' needs a last message of 'assistant' that has a text "
                "and no calls"
            )
            raise wrong_field("continue_final_message", message)
