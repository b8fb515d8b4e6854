"""The body of POST /v1/responses, with its conversion to a body of the chat endpoint."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from tangram.errors import RequestError
from tangram.limits import MAX_TOOLS
from tangram.serve.bodies.answer_body import MaxTokens, ReadAsChat, ResponseFields
from tangram.serve.bodies.body import (
    ALTERNATIVE,
    Body,
    Json,
    Label,
    Metadata,
    OrText,
    Text,
    TypeOnly,
    describe_object,
    encodable,
)
from tangram.serve.bodies.structured import NAME, Function, JsonSchema, NamedTool
from tangram.serve.bodies.template import Effort, Verbosity
from tangram.serve.bodies.unsupported import RESPONSES, wrong_field
from tangram.serve.chat.chat_messages import MAX_MESSAGES, few_arguments
from tangram.serve.chat.schema import ChatRequest
from tangram.serve.responses.items import Item, ItemReference, OtherItem, conversation, write_item


def _as_items(value: Any) -> Any:
    few_arguments(value if isinstance(value, list) else ())
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_NAMED = describe_object(type={"enum": ["function", "custom"]}, name={"type": "string"})
ClientLabels = Annotated[
    dict[Annotated[Text, Field(max_length=256)], Annotated[Text, Field(max_length=16_384)]],
    Field(max_length=64, description="labels, without effect"),
]
_OWN = ("function", "custom")
_MOST_TYPE = 64
_OTHER: Json = {"type": "string", "maxLength": _MOST_TYPE, "not": {"enum": list(_OWN)}}
_MOST_NAMED = 8
_PLACE_DIGITS = 4  # of an item in the input, in its id: there are at most 4096
_PLACE = re.compile(r"^tools\[(\d+)\]")


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    def for_chat(self) -> Json:
        """The tool as the chat endpoint takes it."""
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": self.type, "function": fields}


class TextInput(Body):
    """The form of the input of a custom tool: any text, or one that a grammar allows."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None

    def for_chat(self) -> Json:
        """The form as the chat endpoint takes it."""
        grammar = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": self.type, **({"grammar": grammar} if grammar else {})}


class TextTool(Body):
    """A custom tool, whose input is a text."""

    type: Literal["custom"]
    name: Text = Field(pattern=NAME)
    description: Text | None = None
    format: TextInput = TextInput(type="text")

    def for_chat(self) -> Json:
        """The tool as the chat endpoint takes it."""
        fields = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": self.type, "custom": {**fields, "format": self.format.for_chat()}}


class OtherTool(TypeOnly):
    """A tool that another server runs. It is left out of the prompt, and the answer says so."""

    type: Annotated[Text, Field(max_length=_MOST_TYPE), WithJsonSchema(_OTHER)]


def _name_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    kind = "function" if kind is None else kind
    return f"{ALTERNATIVE}{kind if kind in _OWN else 'other'}"


_AnyTool = Annotated[
    Annotated[FunctionTool, Tag(f"{ALTERNATIVE}function")]
    | Annotated[TextTool, Tag(f"{ALTERNATIVE}custom")]
    | Annotated[OtherTool, Tag(f"{ALTERNATIVE}other")],
    Discriminator(_name_kind),
]


def _choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    match value:
        case {"type": "function" | "custom", "name": str(name)} if len(value) == 2:
            return NamedTool(encodable(name))
        case {"type": str(kind)} if kind not in _OWN:
            kind = kind[:_MOST_TYPE]
            raise ValueError(
                f"names {kind!r}, which is not run here: name a function or leave it out"
            )
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


_ITEMS = TypeAdapter[list[Item]](list[Item])
# What this server has nothing of, or what the answer has in any case: thoughts are text in it.
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(ReadAsChat, ResponseFields):
    """The body of POST /v1/responses."""

    refused = RESPONSES
    names_here: ClassVar = {
        r"(messages|prompt)\b.*": "input",
        r"max_(completion_)?tokens": "max_output_tokens",
        r"tools\[(\d+)\]\.custom\.format\.grammar": r"tools[\1].format",
        r"tools\[(\d+)\]\.(function|custom)": r"tools[\1]",
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
    tools: list[_AnyTool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
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
    store: bool = Field(default=True, description="whether it can be asked for and gone on from")
    previous_response_id: Text | None = Field(
        default=None, description="the input goes on from this stored response"
    )
    background: bool = Field(
        default=False, description="answer at once; GET says what has become of it"
    )
    include: list[Included] = Field(default=[], max_length=16, description="without effect")
    client_metadata: ClientLabels = Field(default={})

    @property
    def served_tools(self) -> list[FunctionTool | TextTool]:
        """The tools that the model may call."""
        return [tool for tool in self.tools if not isinstance(tool, OtherTool)]

    def list_warnings(self) -> list[str]:
        """What the answer says of tools and items that are left out."""
        tools = [tool.type for tool in self.tools if isinstance(tool, OtherTool)]
        items = [item.type for item in self.input if isinstance(item, OtherItem)]
        warnings = []
        for what, given in (("tools", tools), ("input items of tools", items)):
            kinds = list(map(repr, dict.fromkeys(given)))
            named = ", ".join(kinds[:_MOST_NAMED])
            more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
            if kinds:
                warnings.append(f"{what} that are not run here are left out: {named}{more}")
        return warnings

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        for name, wrong in (("store", not self.store), ("stream", self.stream)):
            if self.background and wrong:
                stated = f"{name} is {str(getattr(self, name)).lower()}"
                raise wrong_field(name, f"{stated}, but with background true: leave one out")
        return self

    @property
    def named_items(self) -> list[str]:
        """The ids of stored items in the input."""
        return [item.id for item in self.input if isinstance(item, ItemReference)]

    def write_items(self, named: Mapping[str, Json]) -> list[Json]:
        """The input as clients are shown it, with `named` items for their ids."""
        shared = uuid.uuid4().hex[:-_PLACE_DIGITS]  # ids in order are near in the store's index
        return [
            named[item.id]
            if isinstance(item, ItemReference)
            else write_item(item, f"{shared}{at:0{_PLACE_DIGITS}x}")
            for at, item in enumerate(self.input)
        ]

    def chat(self, earlier: Iterable[Json], named: Mapping[str, Json]) -> ChatRequest:
        """The request as a chat that begins with `earlier` items, with `named` ones for their ids.

        Raises `ValidationError`.
        """
        known = _read_items(named)
        own = (known[item.id] if isinstance(item, ItemReference) else item for item in self.input)
        items = [*_read_items(dict(enumerate(earlier))).values(), *own]
        first = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        fields = {
            "model": self.model,
            "messages": [*first, *conversation(items)],
            "tools": [tool.for_chat() for tool in self.served_tools],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text.format is None else self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
        }
        return ChatRequest.model_validate(fields)

    def rename_field(self, field: str) -> str:
        """As for every body that is read as a chat, which does not have all of the tools."""
        found = super().rename_field(field)
        places = [at for at, tool in enumerate(self.tools) if not isinstance(tool, OtherTool)]
        return _PLACE.sub(lambda place: f"tools[{places[int(place[1])]}]", found)

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


def _read_items(stored: Mapping[Any, Json]) -> dict[Any, Item]:
    """Stored items as input items. Raises `ValueError`."""
    few_arguments(stored.values())
    return dict(zip(stored, _ITEMS.validate_python(list(stored.values())), strict=True))
