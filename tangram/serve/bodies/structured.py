"""The fields that constrain an answer: `response_format`, `tools`, `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from tangram.errors import RequestError
from tangram.serve.bodies.body import (
    ALTERNATIVE,
    Body,
    Json,
    Note,
    Text,
    describe_object,
    encodable,
    name_alternative,
)
from tangram.serve.bodies.json_schema import SchemaBounds
from tangram.serve.bodies.unsupported import wrong_field

_MAX_DEFINITION_CHARACTERS = 65_536
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # or what a backslash escapes
INPUT = "input"  # the parameter of a custom tool
_MAX_DESCRIPTION_CHARACTERS = 65_536  # of what has no effect; a tool's is part of the prompt
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class JsonSchema(Body):
    """A JSON schema. `name` and `description` are labels without effect.

    The answer always follows the schema exactly, whatever `strict` says.
    """

    name: Text = Field(pattern=NAME)
    description: Text | None = Field(default=None, max_length=_MAX_DESCRIPTION_CHARACTERS)
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """The form of an answer: any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise wrong_field(
                "json_schema", "'json_schema' belongs to the type 'json_schema', which needs it"
            )
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema of the answer; None for any text."""
        if self.json_schema is None:
            return {"type": "object"} if self.type == "json_object" else None
        return self.json_schema.schema_


class Function(Body):
    """A function that the model may call; without `parameters` it takes none.

    Arguments always follow the schema, whatever `strict` says.
    """

    name: Text = Field(pattern=NAME)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class InputGrammar(Body):
    """What the input of a custom tool follows: a grammar of llguidance's Lark, or an expression."""

    syntax: Literal["lark", "regex"]
    definition: Text = Field(min_length=1, max_length=_MAX_DEFINITION_CHARACTERS)


class InputFormat(Body):
    """The form of the input of a custom tool: any text, or one that a grammar allows."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> Self:
        if (self.grammar is None) == (self.type == "grammar"):
            raise wrong_field("grammar", "'grammar' belongs to the type 'grammar', which needs it")
        return self


class Custom(Body):
    """A tool whose input is a text. A model reads it as a function with one text, `input`."""

    name: Text = Field(pattern=NAME)
    description: Text | None = None
    format: InputFormat = InputFormat(type="text")

    @property
    def lark(self) -> str | None:
        """The grammar of the input, in llguidance's Lark; None for any text."""
        grammar = self.format.grammar
        if grammar is None or grammar.syntax == "lark":
            return None if grammar is None else grammar.definition
        return f"start: /{_SLASH.sub(_escape_slash, grammar.definition)}/"

    def function(self) -> Function:
        """The tool as a function."""
        text, grammar = {"type": "string"}, self.format.grammar
        if grammar is not None:
            text["description"] = f"follows the {grammar.syntax} grammar: {grammar.definition}"
            if grammar.syntax == "regex":
                text["pattern"] = f"^(?:{grammar.definition})$"
        parameters: Json = {"type": "object", "properties": {INPUT: text}}
        parameters |= {"required": [INPUT], "additionalProperties": False}
        return Function(name=self.name, description=self.description, parameters=parameters)


def _escape_slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


class CustomTool(Body):
    """A custom tool of the chat endpoint."""

    type: Literal["custom"]
    custom: Custom
    cache_control: Note = None


class ToolPlace(Enum):
    """Where the model reads the definition of a tool: it may call what it has read."""

    LIST = "in the list that the chat template has"
    CONVERSATION = "in a message"
    NOWHERE = "nowhere yet"


class Tool(Body):
    """A function, or what is one to the model."""

    type: Literal["function"]
    function: Function
    cache_control: Note = None
    _custom: Custom | None = None
    _place: ToolPlace = ToolPlace.LIST

    @classmethod
    def of(cls, tool: Tool | CustomTool) -> Tool:
        """The tool as a function."""
        if isinstance(tool, Tool):
            return tool
        made = cls(type="function", function=tool.custom.function())
        made._custom = tool.custom
        return made

    @property
    def custom(self) -> Custom | None:
        """What it is to the client, if that is no function."""
        return self._custom

    @property
    def place(self) -> ToolPlace:
        """Where its definition stands in the prompt."""
        return self._place

    def move(self, place: ToolPlace) -> Tool:
        """The tool with its definition there."""
        moved = self.model_copy()
        moved._place = place
        return moved

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.arguments()}}

    def arguments(self) -> dict[str, Any]:
        """The schema of its arguments."""
        if self.function.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.function.parameters}

    def loose_copy(self) -> Tool:
        """The tool as one whose arguments are any object, or its input any text."""
        if self._custom is not None:
            free = self._custom.model_copy(update={"format": InputFormat(type="text")})
            return Tool.of(CustomTool(type="custom", custom=free))
        function = Function(name=self.function.name, parameters={"type": "object"})
        return self.model_copy(update={"function": function})


if TYPE_CHECKING:
    ChatTool = Tool
else:
    ChatTool = Annotated[
        Annotated[Tool, Tag(f"{ALTERNATIVE}function")]
        | Annotated[CustomTool, Tag(f"{ALTERNATIVE}custom")],
        Discriminator(lambda value: name_alternative(value, ("custom",), "function")),
        AfterValidator(Tool.of),
    ]


@dataclass(frozen=True)
class NamedTool:
    """The one function that must be called."""

    name: str


def _choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **more}, **rest} | {
            "type": "custom",
            "custom": {"name": str(name), **more},
            **rest,
        } if not more and not rest:
            return NamedTool(encodable(name))
    raise ValueError(
        'must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": '
        '"..."}}'
    )


class _InFunction:
    """Says in the schema of a choice that what is named stands in the field `function`."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        words, named = handler(core)["anyOf"]
        return {"anyOf": [words, describe_object(type={"const": "function"}, function=named)]}


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_choice), _InFunction()
]


def measure_tools(tools: Sequence[Tool], bounds: SchemaBounds) -> None:
    """Raise `RequestError` for a duplicate name, or for parameters that nothing can be made of."""
    names: set[str] = set()
    for at, tool in enumerate(tools):
        field = f"tools[{at}].function"
        if tool.function.name in names:
            kind = "custom" if tool.custom else "function"
            raise _explain_duplicate(tool.function.name, f"tools[{at}].{kind}.name")
        names.add(tool.function.name)
        bounds.measure(tool.arguments(), f"{field}.parameters")


def check_arguments(tool: Tool, field: str, bounds: SchemaBounds) -> None:
    """Raise `RequestError` for a tool, at `field`, whose parameters are out of `bounds` or no
    object.
    """
    arguments = tool.arguments()
    if arguments["type"] != "object":
        kind = shortened(arguments["type"])
        raise RequestError(
            lambda name: f"{name} is {kind}, it must be 'object': arguments are an object",
            f"{field}.parameters.type",
        )
    bounds.check(arguments, f"{field}.parameters")


def _explain_duplicate(function: str, field: str) -> RequestError:
    return RequestError(lambda name: f"{name} is {function!r} again: give each its own", field)
