"""What a JSON schema allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tangram.errors import RequestError

# Keywords that do not change which texts a schema allows.
NOTES = {"type", "title", "description", "default", "examples", "deprecated", "enum", "const"}
KINDS = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
KINDS |= {float: "number", list: "array", dict: "object"}
DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_MOST_REFERENCES = 8


@dataclass(frozen=True)
class CallRule:
    """The rule `name` of calls of `function`, whose arguments follow the `schema` at `field`.

    With `to_the_letter` their texts must follow it: a form that cannot bound a text so refuses the
    schema. Otherwise such texts are free.
    """

    name: str
    function: str
    schema: Mapping[str, Any]
    field: str
    to_the_letter: bool


def types_of(schema: Any) -> set[str]:
    """The types that a schema names; empty for any."""
    if not isinstance(schema, dict):
        return set()
    if "enum" in schema or "const" in schema:
        return {KINDS[type(value)] for value in list_values(schema)}
    if "type" in schema:
        named = schema["type"]
        return set(named) if isinstance(named, list) else {named}
    either = [types_of(part) for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    return set().union(*either) if all(either) else set()


def list_values(schema: Mapping[str, Any]) -> list[Any]:
    """What a schema with `enum` or `const` allows."""
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


def split_schema(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Schemas that together allow what `schema` does, each of one type where types are given."""
    schema = follow_reference(schema, root)
    if not isinstance(schema, dict):
        return [{}]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return [part for inner in schema[keyword] for part in split_schema(inner, root)]
    types = schema.get("type")
    if isinstance(types, list) and "enum" not in schema:
        return [schema | {"type": kind} for kind in types]
    return [schema]


def blame(message: str, place: str) -> RequestError:
    """The refusal of what a schema says at `place`."""
    return RequestError(lambda name: f"{name}: {message}", place)
