"""Calls as Qwen3-Coder and Qwen3.5 write them: a tag for the function, in it a tag for each
argument, values bare.

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
from collections.abc import Iterator, Mapping
from typing import Any

from tangram.errors import RequestError
from tangram.serve.json_schema import json_rule

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_OPEN, _CLOSE, _END_OF_CALL = "<parameter=", "</parameter>", "</function>"
# A value may say `</parameter>` too: at the end another parameter follows, or none.
_PARAMETER = re.compile(rf"\s*{_OPEN}([^>\n]+)>\n?(.*?)\n?{_CLOSE}\s*(?={_OPEN}|\Z)", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}
_NAMES = re.compile(r"[^<>\n]+")
# Keywords that do not change which texts a schema allows.
_NOTES = {"type", "title", "description", "default", "examples", "deprecated", "enum", "const"}
_KINDS = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
_KINDS |= {float: "number", list: "array", dict: "object"}
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_MOST_REFERENCES = 8


def is_unfinished(text: str) -> bool:
    """Whether `text` is only the beginning of a call: it ends in the value of a parameter, say."""
    return not text.rstrip().endswith(_END_OF_CALL) or text.rfind(_OPEN) > text.rfind(_CLOSE)


def read_tagged_arguments(
    text: str, schemas: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any] | None]:
    """The function that `text` calls, and its arguments; None where it is malformed."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None, None
    name, inside = found[1].strip(), found[2]
    schema = schemas.get(name, {})
    properties = {
        key: follow_reference(value, schema) for key, value in schema.get("properties", {}).items()
    }
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(inside.rstrip()):
        parameter = _PARAMETER.match(inside, at)
        if parameter is None:
            return name, None
        key = parameter[1].strip()
        arguments[key] = _value(parameter[2], properties.get(key, {}))
        at = parameter.end()
    return name, arguments


def _value(text: str, schema: Any) -> Any:
    """The value that `text` stands for: of a type that the schema allows, else the text."""
    allowed = _types(schema)
    if allowed == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = _KINDS[type(value)]
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return value if fits else text


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty for any."""
    if not isinstance(schema, dict):
        return set()
    if "enum" in schema or "const" in schema:
        return {_KINDS[type(value)] for value in _list(schema)}
    if "type" in schema:
        named = schema["type"]
        return set(named) if isinstance(named, list) else {named}
    either = [_types(part) for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    return set().union(*either) if all(either) else set()


def _list(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema["enum"])


def follow_reference(schema: Any, root: Mapping[str, Any]) -> Any:
    """`schema`, or the definition in `root` that it refers to."""
    for _ in range(_MOST_REFERENCES):
        place = schema.get("$ref") if isinstance(schema, dict) else None
        found = _REFERENCE.fullmatch(place) if isinstance(place, str) else None
        if found is None:
            break
        schema = root.get(found[1], {}).get(found[2])
    return schema


def make_tagged_rules(
    rule: str, name: str, schema: Mapping[str, Any], field: str, *, to_the_letter: bool
) -> Iterator[str]:
    """The grammar rules of a call of `name`; the last, `rule`, is the whole call.

    With `to_the_letter` texts must follow the schema: raises `RequestError` (a field inside
    `field`) if the form cannot do that. Otherwise such texts are free.
    """
    parts = []
    required = schema.get("required", ())
    for number, (key, value) in enumerate(schema.get("properties", {}).items()):
        place = f"{field}.properties.{key}"
        if not _NAMES.fullmatch(key):
            message = "this model writes no parameter with '<', '>' or a line break in its name"
            raise _blame(f"{message}: rename it", place)
        inside = f"{rule}_{number}"
        tag = json.dumps(f"<parameter={key}>\n")
        yield f"{inside}: {tag} ({_choices(value, schema, place, to_the_letter)})"
        parts.append(inside if key in required else f"{inside}?")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        parts.append("any*")
    head = json.dumps(f"<function={name}>\n")
    yield f'{rule}: {head} {" ".join(parts)} "</function>"'


BARE_TEXT = [
    "BARE: /(.|\\n)*/",
    'bare[lazy]: BARE "\\n</parameter>\\n"',
    'any: "<parameter=" /[^<>\\n]+/ ">\\n" bare',
]
_END = json.dumps("\n</parameter>\n")


def _choices(schema: Any, root: Mapping[str, Any], place: str, to_the_letter: bool) -> str:
    """The alternatives of a value, each with its end tag."""
    choices = []
    for part in _parts(schema, root):
        said = sorted(part.keys() - _NOTES)
        if "string" not in (_types(part) or {"string"}):
            shared = {key: root[key] for key in _DEFINITIONS if key in root}
            choices.append(f"{json_rule(shared | part)} {_END}")
        elif "enum" in part or "const" in part:
            choices += [f"{json.dumps(_spell(value))} {_END}" for value in _list(part)]
        elif said and to_the_letter:
            message = f"this model writes texts without quotes, which {said[0]!r} cannot bound"
            raise _blame(f"{message}: leave it out", f"{place}.{said[0]}")
        else:
            choices.append("bare")
    return " | ".join(dict.fromkeys(choices))


def _blame(message: str, place: str) -> RequestError:
    return RequestError(lambda name: f"{name}: {message}", place)


def _parts(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Schemas that together allow what `schema` does, each of one type where types are given."""
    schema = follow_reference(schema, root)
    if not isinstance(schema, dict):
        return [{}]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return [part for inner in schema[keyword] for part in _parts(inner, root)]
    types = schema.get("type")
    if isinstance(types, list) and "enum" not in schema:
        return [schema | {"type": kind} for kind in types]
    return [schema]


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
