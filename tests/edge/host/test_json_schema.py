"""Schemas of untrusted clients: what is bounded, what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.errors import RequestError
from tangram.serve.bodies.json_schema import SchemaBounds
from tests.mentions import mentioning, mentions


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def properties(count: int, schema: Any = True) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": schema for number in range(count)}}


def check(schema: dict[str, Any]) -> None:
    bounds = SchemaBounds()
    bounds.measure(schema, "f")
    bounds.check(schema, "f")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        nest(30),
        properties(1000),
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"const": {"not": [1]}}}},
        {"properties": {"not": {"type": "string"}, "if": True}, "additionalProperties": False},
        {
            "title": "t",
            "description": "d",
            "default": {"else": 1},
            "examples": [1],
            "$schema": "s",
            "$comment": "c",
        },
        {"enum": [{"frob": 1}] * 1000},
        {"type": "number", "multipleOf": 0.01, "minimum": -5, "exclusiveMaximum": 3},
        {"type": "integer", "multipleOf": 86400},
        {"type": "string", "pattern": "(a+)+$"},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_schemas_usually_are_passes(schema: dict[str, Any]) -> None:
    check(schema)


@pytest.mark.parametrize(
    ("schema", "field", "words"),
    [
        (nest(200), "f", "64"),
        (nest(5_000), "f", "64"),
        ({"const": [[1]] * 1_000_000}, "f", "2097152"),
        ({"description": "a" * (2 << 20)}, "f", "2097152"),
        ({"description": "\ud800"}, "f", "surrogate"),
        (properties(10_001), "f.properties", "10000"),
        (properties(100, properties(100)), "f.properties.p", "10000"),
        ({"anyOf": [{}] * 10_001}, "f.anyOf", "10000"),
        ({"enum": [1] * 10_001}, "f.enum", "10000"),
        ({"pattern": "a" * 8001}, "f.pattern", "8000"),
        ({"patternProperties": {"a" * 8001: {}}}, "f.patternProperties", "8000"),
        ({"multipleOf": 99999989}, "f.multipleOf", "10000"),
        ({"items": {"multipleOf": 0.0000123457}}, "f.items.multipleOf", "10000"),
        (properties(3, {"multipleOf": 4999}), "f.properties.p", "10000"),
        ({"multipleOf": 10**30 + 1}, "f.multipleOf", "10000"),
        ({"multipleOf": 10**399 + 1}, "f.multipleOf", "10000"),
        ({"multipleOf": 0}, "f.multipleOf", "positive"),
        ({"multipleOf": float("nan")}, "f.multipleOf", "positive"),
        ({"multipleOf": True}, "f.multipleOf", "positive"),
        ({"not": {}}, "f.not", "'not'"),
        ({"x-guidance": {"lenient": True}}, "f.x-guidance", "x-guidance"),
        ({"anyOf": [{}, {"properties": {"a": {"if": {}}}}]}, "f.anyOf[1].properties.a.if", "'if'"),
        ({"uniqueItems": True}, "f.uniqueItems", "'uniqueItems'"),
        ({"properties": []}, "f.properties", "dict"),
        ({"enum": "abc"}, "f.enum", "list"),
        ({"pattern": 1}, "f.pattern", "str"),
        ({"items": [1]}, "f.items", "schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "schema",
)
def test_what_is_out_of_bounds_or_unknown_is_named(
    schema: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(RequestError) as error:
        check(schema)
    assert error.value.field.startswith(field)
    assert mentions(str(error.value), words)
    assert str(error.value).startswith(error.value.field)


def test_the_schemas_of_one_request_share_the_bounds() -> None:
    bounds = SchemaBounds()
    for number in range(100):
        bounds.check(properties(100), f"tools[{number}]")
    with pytest.raises(RequestError, match=mentioning("tools[100].properties 10001 10000")):
        bounds.check(properties(1), "tools[100]")


def test_a_refused_schema_leaves_the_bounds_to_the_others() -> None:
    bounds = SchemaBounds()
    with pytest.raises(RequestError, match="10001"):
        bounds.check(properties(10_001), "tools[0]")
    bounds.check(properties(10_000), "tools[1]")
