"""The body of POST /v1/responses, and its conversion to a body of the chat endpoint."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from tangram.errors import RequestError
from tangram.limits import MAX_TOOLS
from tangram.serve.answer_body import MaxTokens, ReadAsChat, ResponseFields
from tangram.serve.body import Body, Json, Label, Metadata, OrText, Text, describe_object, encodable
from tangram.serve.items import Item, conversation
from tangram.serve.messages import MAX_MESSAGES, few_arguments
from tangram.serve.schema import ChatRequest
from tangram.serve.structured import NAME, Function, JsonSchema, NamedTool
from tangram.serve.template import Effort, Verbosity
from tangram.serve.unsupported import RESPONSES


def _as_items(value: Any) -> Any:
    few_arguments(value if isinstance(value, list) else ())
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_NAMED = describe_object(type={"const": "function"}, name={"type": "string"})


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


def _only_functions(tools: Any) -> Any:
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind != "function":
            raise ValueError(f"item {at} is of type {kind!r}, only functions are supported")
    return tools


def _choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    match value:
        case {"type": "function", "name": str(name)} if len(value) == 2:
            return NamedTool(encodable(name))
    choices = '\'none\', \'auto\', \'required\' or {"type": "function", "name": "..."}'
    raise ValueError(f"must be {choices}")


class TextFormat(JsonSchema):
    """The form of an answer: any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text = Field(default="answer", pattern=NAME)

    def for_chat(self) -> Json:
        """The format as the chat endpoint takes it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextOptions(Body):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Body):
    """How much the model thinks, if its chat template reads that. There are no summaries."""

    refused = {"generate_summary": ("auto",), "summary": ("auto",)}  # noqa: RUF012
    effort: Effort | None = None


class ResponsesRequest(ReadAsChat, ResponseFields):
    """The body of POST /v1/responses."""

    refused = RESPONSES
    names_here: ClassVar = {
        r"(messages|prompt)\b.*": "input",
        r"max_(completion_)?tokens": "max_output_tokens",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"response_format\.json_schema": "text.format",
        r"response_format": "text.format",
        r"reasoning_effort": "reasoning",
        r"verbosity": "text",
    }
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_as_items),
        OrText(),
    ]
    instructions: Text | None = Field(default=None, description="a system message before the input")
    max_output_tokens: Annotated[MaxTokens, Field(gt=0)] | None = None
    tools: Annotated[
        list[FunctionTool],
        Field(max_length=MAX_TOOLS, fail_fast=True),
        BeforeValidator(_only_functions),
    ] = []  # noqa: RUF012 (pydantic copies it)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool,
        BeforeValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
    ] = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["disabled", "auto"] = Field(
        default="disabled", description="auto: the oldest items are left out of too long an input"
    )
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    safety_identifier: Label | None = None
    metadata: Metadata = Field(default={})

    def chat(self) -> ChatRequest:
        """The request as a chat. Raises `ValidationError`."""
        first = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        fields = {
            "model": self.model,
            "messages": [*first, *conversation(self.input)],
            "tools": tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text.format is None else self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
        }
        return ChatRequest.model_validate(fields)

    def rename(self, error: RequestError) -> RequestError:
        """`error` with the names of this endpoint."""
        found = super().rename(error)
        if found.field != "input" or not self.instructions:
            return found
        return RequestError(f"{found}; the instructions count, too", found.field)

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The token limit by its name here."""
        return {"max_tokens": self.max_output_tokens}
