"""The bodies of POST /v1/messages and its count_tokens, in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from tangram.limits import MAX_TOOLS, Texts
from tangram.serve.bodies.answer_body import MaxTokens, MessagesFields, ReadAsChat, texts_of
from tangram.serve.bodies.body import Body, Json, Label, Note, Text
from tangram.serve.bodies.structured import NAME, Function, NamedTool, Tool, ToolPlace
from tangram.serve.bodies.template import FIELD, Effort
from tangram.serve.bodies.unsupported import MESSAGES, wrong_field
from tangram.serve.chat.chat_messages import MAX_MESSAGES
from tangram.serve.chat.schema import ChatRequest
from tangram.serve.messages.blocks import (
    InputTurn,
    TextBlocks,
    conversation_of,
    join_texts,
    references_in,
)
from tangram.types import SAMPLING_LIMITS

# Claude Code begins its system prompt with this note, which differs from request to request: as a
# part of the prompt it would make every prefix another.
_BILLING = "x-anthropic-billing-header:"
# Variables with which templates switch thoughts on and off.
_SWITCHES = ("enable_thinking", "thinking")


class ClientTool(Body):
    """A tool that the client runs."""

    refused = {  # noqa: RUF012 (a ClassVar of the base)
        "allowed_callers": ([], ["direct"]),
        "eager_input_streaming": (False, True),
        "input_examples": ([],),
    }
    type: Literal["custom"] = "custom"
    name: Text = Field(pattern=NAME)
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = Field(
        default=False, description="it is in no prompt before a `tool_reference` names it"
    )
    cache_control: Note = None

    def for_chat(self, found: Collection[str]) -> Tool:
        """The tool as the chat endpoint takes it. `found` are the tools that results name."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        tool = Tool(type="function", function=function)
        if not self.defer_loading:
            return tool
        return tool.move(ToolPlace.CONVERSATION if self.name in found else ToolPlace.NOWHERE)


def _only_client_tools(tools: Any) -> Any:
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(
                f"item {at} is the tool {kind[:64]!r}, which this server does not run: send tools "
                "with an input_schema, which the client runs"
            )
    return tools


class ClientToolChoice(Body):
    """Which tools may be called; `name` is that of the one that must be."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_where_it_belongs(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise wrong_field("name", "'name' belongs to the type 'tool', which needs it")
        return self

    def for_chat(self) -> str | NamedTool:
        """The choice as the chat endpoint takes it."""
        if self.name is not None:
            return NamedTool(self.name)
        return "required" if self.type == "any" else self.type


class ThinkingOptions(Body):
    """Whether the model thinks, if its chat template reads that."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: MaxTokens | None = Field(
        default=None, description="the most tokens of a thought"
    )
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget_where_it_belongs(self) -> Self:
        if (self.budget_tokens is None) == (self.type == "enabled"):
            message = "'budget_tokens' belongs to the type 'enabled', which needs it"
            raise wrong_field("budget_tokens", message)
        return self


class OutputSchema(Body):
    """The JSON schema that an answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def for_chat(self) -> Json:
        """The format as the chat endpoint takes it."""
        named = {"name": "answer", "schema": self.schema_}
        return {"type": self.type, "json_schema": named}


class OutputOptions(Body):
    """How much the model thinks, where its chat template reads that, and the form of its answer."""

    effort: Effort | None = None
    format: OutputSchema | None = None


class UserLabel(Body):
    """A label of the user, without effect."""

    user_id: Label | None = None


class CountTokensRequest(ReadAsChat, Body):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    refused = MESSAGES
    names_here: ClassVar = {
        r"(messages|prompt)\b.*": "messages",
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"response_format\.json_schema": "output_config.format",
        r"response_format": "output_config.format",
        r"reasoning_effort": "thinking",
        r"chat_template_kwargs\b.*": "thinking",
        r"stop\b": "stop_sequences",
        r"thinking_token_budget": "thinking.budget_tokens",
    }
    model: Text
    messages: list[InputTurn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: TextBlocks = []  # noqa: RUF012 (pydantic copies it)
    tools: Annotated[
        list[ClientTool],
        Field(max_length=MAX_TOOLS, fail_fast=True),
        BeforeValidator(_only_client_tools),
    ] = []  # noqa: RUF012
    tool_choice: ClientToolChoice = ClientToolChoice(type="auto")
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions = OutputOptions()
    cache_control: Note = None

    @model_validator(mode="after")
    def _references_are_of_tools(self) -> Self:
        if self.tools and all(tool.defer_loading for tool in self.tools):
            message = "'tools' all have 'defer_loading': leave it out of the one that finds others"
            raise wrong_field("tools", message)
        unknown = references_in(self.messages) - {tool.name for tool in self.tools}
        if unknown:
            message = f"a 'tool_reference' names {min(unknown)!r}, which is none of the 'tools'"
            raise wrong_field("messages", f"{message}: send its definition there")
        return self

    def chat(self, variables: Collection[str]) -> ChatRequest:
        """The conversation as a chat, for a template that reads `variables`.

        Raises `ValidationError`.
        """
        system = join_texts(part for part in self.system if not part.text.startswith(_BILLING))
        first = [{"role": "system", "content": system}] if system else []
        found, output = references_in(self.messages), self.output_config.format
        tools = [tool.for_chat(found) for tool in self.tools]
        definitions = {
            tool.function.name: json.dumps(tool.for_template(), ensure_ascii=False)
            for tool in tools
            if tool.place is ToolPlace.CONVERSATION
        }
        turns = list(conversation_of(self.messages, definitions))
        last = turns[-1]
        begun = last["role"] == "assistant" and not last.get("tool_calls")
        fields = {
            "model": self.model,
            "messages": [*first, *turns],
            "continue_final_message": begun and bool((last.get("content") or "").strip()),
            "tools": tools,
            "tool_choice": self.tool_choice.for_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": None if output is None else output.for_chat(),
            **self._thoughts(variables),
        }
        return ChatRequest.model_validate(fields)

    def _thoughts(self, variables: Collection[str]) -> Json:
        """What the template is told of thoughts, as far as it listens."""
        effort = self.output_config.effort if "reasoning_effort" in variables else None
        if self.thinking is None:
            return {"reasoning_effort": effort}
        thinks = self.thinking.type != "disabled"
        switches = {name: thinks for name in _SWITCHES if name in variables}
        return {"reasoning_effort": effort if thinks or switches else "none", FIELD: switches}


_STOP = cast("Texts", SAMPLING_LIMITS["stop"])


class MessagesRequest(CountTokensRequest, MessagesFields):
    """The body of POST /v1/messages.

    An answer ends where the context is full, also if `max_tokens` would allow more.
    """

    max_tokens: MaxTokens
    stop_sequences: Annotated[
        list[Text], Field(max_length=_STOP.most, fail_fast=True), WithJsonSchema(texts_of(_STOP))
    ] = []  # noqa: RUF012
    metadata: UserLabel = UserLabel()
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="there is one tier"
    )

    @property
    def hides_thoughts(self) -> bool:
        """Whether the client asks for thoughts without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The stop strings and the budget of thoughts, by their names here."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return {"stop": self.stop_sequences, "thinking_token_budget": budget}
