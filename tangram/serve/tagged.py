"""Calls with tags. The function has one, in it each argument, values bare.

    <function=look>
    <parameter=city>
    Rome
    </parameter>
    </function>

Text is not quoted, so only the function's schema says whether `3` is a number or a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from tangram.engine.text.formats import loosen, split_shape
from tangram.serve.json_schema import json_rule
from tangram.serve.json_text import refuse_constant
from tangram.serve.literals import read_python_value
from tangram.serve.schema_parts import (
    DEFINITIONS,
    KINDS,
    NOTES,
    blame,
    follow_reference,
    list_values,
    split_schema,
    types_of,
)
from tangram.types import ToolFormat

_NAMES = re.compile(r"[^<>\n]+")


def is_unfinished(text: str, form: ToolFormat) -> bool:
    """Whether `text` is only the beginning of a call: it ends in the value of an argument, say."""
    opening, *_, closing = (part.strip() for part in split_shape(form.argument))
    end = split_shape(form.call)[-1].strip()
    return not text.rstrip().endswith(end) or text.rfind(opening) > text.rfind(closing)


def read_tagged_calls(
    text: str, form: ToolFormat, schemas: Mapping[str, Any]
) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
    """Name and arguments of each call in `text`; None for a malformed one, which is the last."""
    (head, argument, tail), at, end = _patterns(form), 0, len(text.rstrip())
    while at < end:
        found = head.match(text, at)
        if found is None:
            yield None, None
            return
        name, at = found[1].strip(), found.end()
        schema = schemas.get(name, {})
        arguments: dict[str, Any] = {}
        while (given := argument.match(text, at)) is not None:
            key, at = given[1].strip(), given.end()
            allowed = follow_reference(schema.get("properties", {}).get(key, {}), schema)
            arguments[key] = _value(given[2], allowed)
        closed = tail.match(text, at)
        if closed is None:
            yield name, None
            return
        at = closed.end()
        yield name, arguments


@cache
def _patterns(form: ToolFormat) -> tuple[re.Pattern[str], ...]:
    """What finds the beginning of a call, one of its arguments, and its end."""
    before, _, after, _, end = split_shape(form.call)
    head = rf"\s*{loosen(before)}([^<>\n{re.escape(after[:1])}]+){loosen(after)}"
    tail = rf"\s*{loosen(end)}\s*"
    opening, _, middle, _, closing = split_shape(form.argument)
    # A value may say its end tag too: at the end another argument follows, or none.
    last = rf"{tail}(?:{loosen(before)}|\Z)" if end and before else rf"{tail}\Z"
    gaps = ["\n?" if "\n" in edge else "" for edge in (middle[-1:], closing[:1])]
    argument = (
        rf"\s*{loosen(opening)}([^<>\n{re.escape(middle[:1])}]+){loosen(middle.rstrip())}"
        rf"{gaps[0]}(.*?){gaps[1]}{loosen(closing.strip())}\s*(?={loosen(opening)}|{last})"
    )
    return tuple(re.compile(each, re.DOTALL) for each in (head, argument, tail))


def _value(text: str, schema: Any) -> Any:
    """The value that `text` stands for: of a type that the schema allows, else the text."""
    allowed = types_of(schema)
    if allowed == {"string"}:
        return text
    value = _read(text)
    kind = KINDS[type(value)]
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return value if fits else text


def _read(text: str) -> Any:
    """The value that `text` writes as JSON or as Python does, else the text."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=refuse_constant)
    with suppress(ValueError):
        value = read_python_value(text)
        return text if isinstance(value, str) else value
    return text


def make_tagged_rules(
    rule: str,
    name: str,
    schema: Mapping[str, Any],
    field: str,
    form: ToolFormat,
    write: Callable[[str], str],
    *,
    to_the_letter: bool,
) -> Iterator[str]:
    """The grammar rules of a call of `name`; the last, `rule`, is the whole call.

    `write` makes a part of a grammar of a text that has marks. With `to_the_letter` texts must
    follow the schema: raises `RequestError` (a field inside `field`) if the form cannot do that.
    Otherwise such texts are free.
    """
    before, _, after, _, closing = split_shape(form.call)
    opening, _, middle, _, end = split_shape(form.argument)
    parts = []
    required = schema.get("required", ())
    for number, (key, value) in enumerate(schema.get("properties", {}).items()):
        place = f"{field}.properties.{key}"
        if not _NAMES.fullmatch(key):
            message = "this model writes no parameter with '<', '>' or a line break in its name"
            raise blame(f"{message}: rename it", place)
        inside = f"{rule}_{number}"
        choices = _choices(value, schema, place, write(end), write, to_the_letter=to_the_letter)
        yield f"{inside}: {write(f'{opening}{key}{middle}')} ({choices})"
        parts.append(inside if key in required else f"{inside}?")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        parts.append("any*")
    yield f"{rule}: {write(f'{before}{name}{after}')} {' '.join(parts)} {write(closing)}"


def _choices(
    schema: Any,
    root: Mapping[str, Any],
    place: str,
    end: str,
    write: Callable[[str], str],
    *,
    to_the_letter: bool,
) -> str:
    """The alternatives of a value, each with its end tag."""
    choices = []
    for part in split_schema(schema, root):
        said = sorted(part.keys() - NOTES)
        if "string" not in (types_of(part) or {"string"}):
            shared = {key: root[key] for key in DEFINITIONS if key in root}
            choices.append(f"{json_rule(shared | part)} {end}")
        elif "enum" in part or "const" in part:
            choices += [f"{write(_spell(value))} {end}" for value in list_values(part)]
        elif said and to_the_letter:
            message = f"this model writes texts without quotes, which {said[0]!r} cannot bound"
            raise blame(f"{message}: leave it out", f"{place}.{said[0]}")
        else:
            choices.append("bare")
    return " | ".join(dict.fromkeys(choices))


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
