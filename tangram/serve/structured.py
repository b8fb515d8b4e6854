"""From `response_format` and `tools` to the grammar of an answer (llguidance's Lark dialect, `engine/grammar.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tangram.errors import RequestError
from tangram.serve.body import Body, Text, encodable
from tangram.serve.json_schema import SchemaBounds
from tangram.serve.unsupported import wrong_field
from tangram.types import ToolFormat

MAX_TOOLS = 128
_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
# A model that may put any number of spaces somewhere sometimes never ends.
_STYLE = {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{1,20}"}}


class JsonSchema(Body):
    """`name` and `description` are labels, without effect; a schema is followed to the letter, strict or not."""

    name: Text = Field(pattern=_NAME)
    description: Text | None = None
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """What an answer must be: any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise wrong_field("json_schema", "'json_schema' belongs to the type 'json_schema', which needs it")
        return self

    def schema_for(self, bounds: SchemaBounds) -> dict[str, Any] | None:
        """None for any text. Raises `RequestError` where the schema is out of `bounds`."""
        if self.json_schema is None:
            return {"type": "object"} if self.type == "json_object" else None
        bounds.check(self.json_schema.schema_, "response_format.json_schema.schema")
        return self.json_schema.schema_


class Function(Body):
    """A function that the model may call; without `parameters` it has none. Arguments follow them, strict or not."""

    name: Text = Field(pattern=_NAME)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    """One tool: only functions are."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.arguments()}}

    def arguments(self) -> dict[str, Any]:
        """The schema of its arguments."""
        if self.function.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.function.parameters}


@dataclass(frozen=True)
class NamedTool:
    """The one function that must be called."""

    name: str


def _choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name)}} if len(value) == len(value["function"]) + 1 == 2:
            return NamedTool(encodable(name))
    raise ValueError('must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": "..."}}')


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_choice)]


def check_tools(tools: Sequence[Tool], bounds: SchemaBounds) -> None:
    """Raise `RequestError` for a name that comes twice or parameters that are out of `bounds` or no object."""
    names: set[str] = set()
    for at, tool in enumerate(tools):
        field = f"tools[{at}].function"
        if tool.function.name in names:
            raise RequestError(f"{field}.name is {tool.function.name!r} again: give each its own", f"{field}.name")
        names.add(tool.function.name)
        arguments = tool.arguments()
        if arguments["type"] != "object":
            message = f"{field}.parameters has a type other than 'object': arguments are a JSON object"
            raise RequestError(message, f"{field}.parameters.type")
        bounds.check(arguments, f"{field}.parameters")


def answer_grammar(schema: dict[str, Any]) -> str:
    """Answers that `schema` allows."""
    return f"start: {_json(schema)}\n"


@dataclass(frozen=True)
class CallGrammar:
    """Answers that call `tools`, in the `form` of the model: where `forced` they do nothing else.

    With `parallel` there may be several calls. Who does not call answers as `schema` says; None, in any text, in which
    `control_token_ids` may be as without a grammar.
    """

    tools: Sequence[Tool]
    form: ToolFormat
    forced: bool
    parallel: bool
    schema: dict[str, Any] | None
    control_token_ids: Sequence[int]

    def source(self) -> str:
        """The grammar."""
        return "\n".join(["%llguidance {}", *self._start(), *self._bodies(), ""])

    def _start(self) -> list[str]:
        form, several = self.form, self.parallel and bool(self.form.begin)
        call = f"call: {_text(form.begin)} body {_text(form.end)}" if form.begin else "call: body"
        calls = 'calls: call ("\\n" call)*' if several else "calls: call"
        if self.forced:
            return ["start: calls", calls, call]
        if self.schema is not None:
            return ["start: calls | answer", calls, call, f"answer: {_json(self.schema)}"]
        return self._prose(several)

    def _prose(self, several: bool) -> list[str]:
        """Any text: the beginning of a call in it makes the rest one."""
        marker = self.form.begin.strip()
        ids = ",".join(map(str, self.control_token_ids))
        rules = [f"note: TEXT <[{ids}]>"] if ids else []
        note = "note" if ids else ""
        if not marker:
            rules += ['TEXT: /(.|\\n)*/ & ~/\\{"name": "(.|\\n)*/', "spoken: body"]
        else:
            rest = self.form.begin[self.form.begin.index(marker) + len(marker) :]
            rules += ["TEXT: /(.|\\n)*/", f"head[lazy]: TEXT {_text(marker)}"]
            rules += [f"spoken: head {_text(rest)} body {_text(self.form.end)}"]
        start = f"start: (spoken | {note})* TEXT" if ids else "start: spoken* TEXT"
        alone = f"start: {note}* (spoken | TEXT)" if ids else "start: spoken | TEXT"
        return [start if several else alone, *rules]

    def _bodies(self) -> list[str]:
        names = [f"body_{at}" for at in range(len(self.tools))]
        bodies = [f"body: {' | '.join(names)}"]
        for name, tool in zip(names, self.tools, strict=True):
            head = f'{{"name": "{tool.function.name}", "{self.form.arguments}": '
            bodies.append(f'{name}: {_text(head)} {_json(tool.arguments())} "}}"')
        return bodies


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(_STYLE | schema)}"


def _text(literal: str) -> str:
    return json.dumps(literal) if literal else ""
