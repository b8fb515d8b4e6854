"""Schemas that no finite answer satisfies are found, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import RequestError
from tangram.serve.bodies.json_schema import SchemaBounds, requires_itself

A, B, ROOT = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}


def needs(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], **more}


def define(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return schema | {"$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        needs("self", ROOT),
        define(A, a=needs("b", B), b=needs("a", A)),
        define(A, a=A),
        define(A, a={"allOf": [{"type": "string"}, A]}),
        {"type": "array", "items": ROOT, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2},
        {"type": "object", "additionalProperties": ROOT, "required": ["any"]},
        define(needs("x/y", {"$ref": "#/properties/x~1y"})),
        {"type": "object", "minProperties": 1, "additionalProperties": ROOT},
        define(A, a={"anyOf": [needs("b", A), needs("c", A)]}),
        define(A, a={"oneOf": [needs("b", A), {"type": "array", "items": A, "minItems": 2}]}),
    ],
)
def test_what_always_asks_for_more_is_refused(schema: dict[str, Any]) -> None:
    assert requires_itself(schema)
    with pytest.raises(RequestError, match=r"^f.*never") as caught:
        SchemaBounds().check(schema, "f")
    assert caught.value.field == "f"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"next": ROOT}},
        needs("next", {"anyOf": [ROOT, {"type": "null"}]}),
        needs("children", {"type": "array", "items": ROOT}),
        needs("self", ROOT) | {"type": ["object", "null"]},
        {"properties": {"a": ROOT}, "required": ["a"]},
        define(A, a=needs("b", B), b={"type": "object", "properties": {"a": A}}),
        {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 1},
        {
            "type": "object",
            "additionalProperties": ROOT,
            "properties": {"x": {"type": "null"}},
            "minProperties": 1,
        },
        needs("self", ROOT) | {"const": 1},
        {"$ref": "#/nowhere/3"},
    ],
)
def test_what_can_end_passes(schema: Any) -> None:
    assert not requires_itself(schema)


@given(st.permutations(range(60)))
def test_a_long_chain_ends_where_its_last_link_does(order: list[int]) -> None:
    links = {f"l{at}": needs("n", {"$ref": f"#/$defs/l{at + 1}"}) for at in order}
    start = {"$ref": "#/$defs/l0"}
    assert not requires_itself(define(start, **links, l60={"type": "null"}))
    assert requires_itself(define(start, **links, l60=start))


KEYWORDS = [
    "$ref",
    "type",
    "properties",
    "required",
    "allOf",
    "anyOf",
    "items",
    "minItems",
    "minProperties",
]
JSON = st.recursive(
    st.sampled_from(
        [None, True, -1, 2.5, float("nan"), "object", "array", "#", "#/properties/a", "#/items/0"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(JSON)
def test_any_json_is_answered(schema: Any) -> None:
    assert requires_itself(schema) in (True, False)
