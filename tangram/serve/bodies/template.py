"""What a request passes to the chat template: `chat_template_kwargs`, and two other fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from tangram.engine.text.codec import TextCodec
from tangram.errors import RequestError
from tangram.limits import TEMPLATE_NAMES
from tangram.serve.bodies.body import deeper_than
from tangram.serve.bodies.unsupported import IgnoredFields, wrong_field

FIELD = "chat_template_kwargs"
_MOST_OPTIONS = 16
_MOST_NAME_CHARACTERS = 64
_MOST_LEVELS = 3
_MOST_BYTES = 4096
_MOST_NUMBER = 1_000_000  # a template may repeat something so often


def _limit(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        shown = name[:_MOST_NAME_CHARACTERS]
        if len(name) > _MOST_NAME_CHARACTERS or not (name.isascii() and name.isidentifier()):
            message = f"must be a name of up to {_MOST_NAME_CHARACTERS} letters, digits and _"
            raise wrong_field(shown, f"'{FIELD}.{shown}': {message}")
        if name in TEMPLATE_NAMES:
            raise wrong_field(name, f"'{FIELD}.{name}' is the server's to set: leave it out")
        if deeper_than(options[name], _MOST_LEVELS):
            raise wrong_field(
                name, f"'{FIELD}.{name}' is nested in more than {_MOST_LEVELS} levels"
            )
    size = len(json.dumps(options))
    if size > _MOST_BYTES:
        raise ValueError(f"has {size} bytes as JSON, at most {_MOST_BYTES} are allowed")
    for name, value in options.items():
        _check_leaves(name, value)
    return options


def _check_leaves(name: str, value: Any) -> None:
    for leaf in _leaves(value):
        if isinstance(leaf, str):
            try:
                leaf.encode()
            except UnicodeEncodeError:
                message = "holds half a surrogate pair, which is not Unicode text"
                raise wrong_field(name, f"'{FIELD}.{name}' {message}") from None
        elif leaf is not None and not -_MOST_NUMBER <= leaf <= _MOST_NUMBER:
            message = f"holds a number outside of [-{_MOST_NUMBER}, {_MOST_NUMBER}]"
            raise wrong_field(name, f"'{FIELD}.{name}' {message}")


def _leaves(value: Any) -> Iterator[Any]:
    """The texts, numbers and nulls of a JSON value, and its names."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


TemplateOptions = Annotated[
    dict[str, Any],
    Field(
        max_length=_MOST_OPTIONS, description="variables of the chat template, those that it reads"
    ),
    AfterValidator(_limit),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": _MOST_OPTIONS,
            "propertyNames": {
                "pattern": "^[A-Za-z_][A-Za-z_0-9]{0,63}$",
                "not": {"enum": sorted(TEMPLATE_NAMES)},
            },
        }
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Template:
    """The chat template of `codec`, and the variables that requests may set."""

    def __init__(self, codec: TextCodec, ignored: IgnoredFields | None) -> None:
        self._codec, self._ignored = codec, ignored

    def set_variables(
        self,
        options: Mapping[str, Any],
        effort: Effort | None = None,
        verbosity: Verbosity | None = None,
    ) -> dict[str, Any]:
        """The variables that a request sets: its `options`, and two fields that are variables too.

        Raises `RequestError` for a variable that the template does not read, unless such fields are
        ignored. A value that asks for nothing passes: `"none"` of effort, `"medium"` of verbosity.
        """
        readable, wanted = self._codec.template_options, dict(options)
        fields = {name: f"{FIELD}.{name}" for name in wanted}
        asked = (("reasoning_effort", effort, "none"), ("verbosity", verbosity, "medium"))
        for name, value, neutral in asked:
            if value is None:
                continue
            variable, meant = _interpret(name, value, readable)
            if variable in wanted and wanted[variable] != meant:
                raise _explain_conflict(name, value, variable)
            if variable in readable or value != neutral:
                wanted[variable], fields[variable] = meant, name
        for name in sorted(wanted.keys() - readable):
            self._refuse(fields[name], readable)
        return {name: value for name, value in wanted.items() if name in readable}

    def _refuse(self, field: str, readable: frozenset[str]) -> None:
        if self._ignored is not None:
            self._ignored.note(field.partition(".")[0])
            return
        if not readable:
            field = field.partition(".")[0]
        known = ", ".join(sorted(readable)) or "no variable of a request"
        reads = f"this model's chat template reads {known}"
        raise RequestError(lambda name: f"{name} is not supported: {reads}, leave it out", field)


def _explain_conflict(field: str, value: str, variable: str) -> RequestError:
    return RequestError(
        lambda name: f"{name} is {value!r} and {FIELD}.{variable} says otherwise: send one of them",
        field,
    )


def _interpret(field: str, value: str, readable: frozenset[str]) -> tuple[str, Any]:
    """The variable and its value. Effort "none" switches thinking off where the template reads
    that.
    """
    if (
        (field, value) == ("reasoning_effort", "none")
        and field not in readable
        and "enable_thinking" in readable
    ):
        return "enable_thinking", False
    return field, value
