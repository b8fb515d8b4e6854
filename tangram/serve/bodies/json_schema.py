"""JSON schemas from clients: bounded before use, and refused for keywords without effect.

The bounds are on what makes the grammar compiler slow: `multipleOf` takes time with its square,
properties and `enum` in proportion. The compiler's own limits refuse large expressions and unions.
A trial in a process of its own refuses the rest (`engine/text/grammar_trial.py`).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from reprlib import repr as shortened
from typing import Any
from urllib.parse import unquote

from tangram.errors import RequestError
from tangram.limits import (
    MAX_ENUM_VALUES,
    MAX_MULTIPLES,
    MAX_PATTERN_CHARACTERS,
    MAX_PROPERTIES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_LEVELS,
)
from tangram.serve.bodies.body import deeper_than
from tangram.serve.bodies.schema_parts import blame

_ONE = {"items", "additionalProperties"}
_LISTED = {"anyOf", "oneOf", "allOf", "prefixItems"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_PLAIN = {
    *("type", "enum", "const", "required", "minItems", "maxItems", "minProperties"),
    *("maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref", "$schema", "$id", "$comment"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
}
# With unbounded spaces, some models never end.
_GAP = r"[ \t\n\r]{1,20}"
_STYLE = {"x-guidance": {"whitespace_pattern": _GAP}}
JSON_GAP = f"/{_GAP}/?"


def json_rule(schema: dict[str, Any]) -> str:
    """JSON that `schema` allows, as a part of a grammar."""
    return f"%json {json.dumps(_STYLE | schema)}"


@dataclass
class SchemaBounds:
    """Sums over the schemas of one request. `measure` each of them, then `check` it."""

    schema_bytes: int = 0
    properties: int = 0
    enum_values: int = 0
    pattern_characters: int = 0
    multiples: int = 0

    def measure(self, schema: dict[str, Any], field: str) -> None:
        """Raise `RequestError` (`field`) for a schema that is too large or deep, or no Unicode."""
        size, levels = _least_size(schema)
        if levels > MAX_SCHEMA_LEVELS + 1 or (
            size <= MAX_SCHEMA_BYTES and deeper_than(schema, MAX_SCHEMA_LEVELS)
        ):
            raise RequestError(
                lambda name: (
                    f"{name} is nested in more than {MAX_SCHEMA_LEVELS} levels of JSON: make it "
                    "flatter, or use $ref"
                ),
                field,
            )
        _at_most(size, MAX_SCHEMA_BYTES, "bytes of schema, or more", field)
        try:
            size = len(json.dumps(schema, ensure_ascii=False).encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                lambda name: f"{name} holds half a surrogate pair, which is not Unicode text", field
            ) from error
        self.schema_bytes += size
        _at_most(self.schema_bytes, MAX_SCHEMA_BYTES, "bytes of schema", field)

    def check(self, schema: dict[str, Any], field: str) -> None:
        """Raise `RequestError` for a place at or under `field` that is out of bounds or without
        effect. Then it does not count.
        """
        before = replace(self)
        try:
            self._check(schema, field)
        except RequestError:
            vars(self).update(vars(before))
            raise

    def _check(self, schema: dict[str, Any], field: str) -> None:
        places = [(schema, field)]
        while places:
            found, place = places.pop()
            places += self._parts(found, place)
        if requires_itself(schema):
            raise RequestError(
                lambda name: (
                    f"{name} can never be finished: each value it allows needs another one "
                    "inside, without end; let a required property be null, or leave it out of "
                    "'required'"
                ),
                field,
            )

    def _parts(self, schema: Any, place: str) -> Iterator[tuple[Any, str]]:
        """The schemas directly inside `schema`, whose keywords are checked."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise RequestError(
                lambda name: f"{name} is no JSON schema: it must be an object or a boolean", place
            )
        for keyword, value in schema.items():
            inside = f"{place}.{keyword}"
            self._count(keyword, value, inside)
            if keyword in _ONE:
                yield value, inside
            elif keyword in _LISTED:
                yield from (
                    (item, f"{inside}[{at}]") for at, item in enumerate(_of(list, value, inside))
                )
            elif keyword in _NAMED:
                yield from (
                    (item, f"{inside}.{name}") for name, item in _of(dict, value, inside).items()
                )
            elif keyword not in _PLAIN:
                raise blame(f"the keyword {keyword!r} is not supported: leave it out", inside)

    def _count(self, keyword: str, value: Any, place: str) -> None:
        if keyword in ("properties", "patternProperties", "prefixItems", "anyOf", "oneOf", "allOf"):
            self.properties += len(
                _of(dict if keyword.endswith("roperties") else list, value, place)
            )
            _at_most(self.properties, MAX_PROPERTIES, "properties and alternatives", place)
        elif keyword == "enum":
            self.enum_values += len(_of(list, value, place))
            _at_most(self.enum_values, MAX_ENUM_VALUES, "values", place)
        elif keyword == "multipleOf":
            self.multiples += _digits(value, place)
            _at_most(
                self.multiples,
                MAX_MULTIPLES,
                "as the sum of multipleOf, without zeros at either end",
                place,
            )
        patterns = (
            [value] if keyword == "pattern" else value if keyword == "patternProperties" else []
        )
        self.pattern_characters += sum(len(_of(str, pattern, place)) for pattern in patterns)
        _at_most(
            self.pattern_characters,
            MAX_PATTERN_CHARACTERS,
            "characters of regular expressions",
            place,
        )


def requires_itself(schema: Any) -> bool:
    """Whether each value of `schema` needs another one inside, without end.

    A schema ends if of each of its needs one alternative does. `$ref` is followed within `schema`.
    """
    left, users, places = dict[int, int](), defaultdict[int, set[tuple[int, int]]](set), [schema]
    ended: list[int] = []
    while places:
        place = places.pop()
        if id(place) in left:
            continue
        # What is no object is true, false or absent: it needs nothing.
        found = _list_needs(schema, place)
        needs = [need for need in found if all(isinstance(part, dict) for part in need)]
        left[id(place)] = len(needs)
        for number, need in enumerate(needs):
            for part in need:
                users[id(part)].add((id(place), number))
            places += need
        if not needs:
            ended.append(id(place))
    met = set[tuple[int, int]]()
    while ended:
        for user in users[ended.pop()] - met:
            met.add(user)
            left[user[0]] -= 1
            if not left[user[0]]:
                ended.append(user[0])
    return left[id(schema)] > 0


def _list_needs(root: Any, schema: Any) -> Iterator[list[Any]]:
    """What each value of `schema` holds, or satisfies, too: one alternative of each list."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return
    parts, kind = defaultdict(tuple, schema), schema.get("type")
    if isinstance(parts["$ref"], str):
        yield [_target(root, parts["$ref"])]
    if isinstance(parts["allOf"], list):
        yield from ([part] for part in parts["allOf"])
    yield from (
        either for name in ("anyOf", "oneOf") if isinstance(either := parts[name], list) and either
    )
    if kind in ("object", ["object"]):
        yield from _list_properties(parts)
    least, first = schema.get("minItems"), parts["prefixItems"]
    if kind in ("array", ["array"]) and isinstance(least, int | float) and least >= 1:
        first = first if isinstance(first, list) else []
        yield from ([part] for part in first[: int(min(least, len(first)))])
        if least > len(first):
            yield [schema.get("items")]


def _list_properties(parts: Mapping[str, Any]) -> Iterator[list[Any]]:
    """What each object of a schema with `parts` holds."""
    known = parts["properties"] if isinstance(parts["properties"], dict) else {}
    others, required = parts.get("additionalProperties"), parts["required"]
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str):
            yield [known.get(name, others)]
    least, patterns = parts.get("minProperties"), parts.get("patternProperties") or {}
    if isinstance(least, int | float) and least >= 1 and isinstance(patterns, dict):
        yield [*known.values(), *patterns.values(), *([] if others is False else [others])]


def _target(root: Any, reference: str) -> Any:
    """The target of a JSON pointer such as "#/$defs/a"; None for none."""
    place = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(name)
        elif isinstance(place, list) and name.isdecimal() and len(name) < 6:
            place = place[int(name)] if int(name) < len(place) else None
        else:
            return None
    return place


def _least_size(schema: Any) -> tuple[int, int]:
    """A lower bound on the bytes and levels of its JSON.

    It is exact enough for the bounds, and stops once they are exceeded.
    """
    size, deepest, places = 0, 0, [(schema, 1)]
    while places and size <= MAX_SCHEMA_BYTES and deepest <= MAX_SCHEMA_LEVELS + 1:
        place, level = places.pop()
        size += len(place) if isinstance(place, (str, list, dict)) else 1
        if isinstance(place, (list, dict)) and size <= MAX_SCHEMA_BYTES:
            deepest = max(deepest, level)
            items = chain(place, place.values()) if isinstance(place, dict) else place
            places += [(item, level + 1) for item in items]
    return size, deepest


def _digits(value: Any, place: str) -> int:
    """The significant digits of a number, as a number: 25 of 0.25, 864 of 86400."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise RequestError(
            lambda name: f"{name} is {shortened(value)}, it must be a positive number", place
        )
    digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits)).strip("0")
    return int(digits) if len(digits) < 9 else 10**9


def _of(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, kind):
        raise RequestError(lambda name: f"{name} must be of type {kind.__name__}", place)
    return value


def _at_most(number: int, limit: int, what: str, place: str) -> None:
    if number > limit:
        message = f"with it the schemas of this request have {number} {what}, at most {limit} are"
        raise blame(f"{message} allowed: make them smaller", place)
