"""The fields that constrain an answer: `response_format`, `tools`, `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from tangram.errors import RequestError
from tangram.serve.body import Body, Json, Note, Text, describe_object, encodable
from tangram.serve.json_schema import SchemaBounds
from tangram.serve.unsupported import wrong_field

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


class Tool(Body):
    """One tool; only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: Note = None

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
        """The tool as one whose arguments are any object."""
        free = Function(name=self.function.name, parameters={"type": "object"})
        return self.model_copy(update={"function": free})


@dataclass(frozen=True)
class NamedTool:
    """The one function that must be called."""

    name: str


def _choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name)}} if (
            len(value) == len(value["function"]) + 1 == 2
        ):
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
            raise _explain_duplicate(tool.function.name, f"{field}.name")
        names.add(tool.function.name)
        bounds.measure(tool.arguments(), f"{field}.parameters")


def check_arguments(tool: Tool, field: str, bounds: SchemaBounds) -> None:
    """Raise `RequestError` for a tool, at `field`, whose parameters are out of `bounds` or no
    object.
    """
    arguments = tool.arguments()
    if arguments["type"] != "object":
        raise _explain_type(arguments["type"], f"{field}.parameters.type")
    bounds.check(arguments, f"{field}.parameters")


def _explain_duplicate(function: str, field: str) -> RequestError:
    return RequestError(lambda name: f"{name} is {function!r} again: give each its own", field)


def _explain_type(kind: Any, field: str) -> RequestError:
    return RequestError(
        lambda name: f"{name} is {shortened(kind)}, it must be 'object': arguments are an object",
        field,
    )
