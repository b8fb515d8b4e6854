"""Whether a JSON schema allows a finite value: a schema may require itself without end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, TypeVar
from urllib.parse import unquote

Kind = TypeVar("Kind", dict[str, Any], list[Any])


def can_end(schema: Any) -> bool:
    """Whether some finite JSON value may satisfy `schema`.

    Only `$ref` inside the schema and required parts are looked at, so False is certain and True is
    not. It is the least fixed point over all `$ref`: a reference can end once its target can.
    """
    waiting, ended = _references(schema), set[str]()
    dependents = defaultdict[str, set[str]](set)
    for reference in waiting:
        for other in _references(_target(schema, reference)):
            dependents[other].add(reference)
    queue = list(waiting)
    while queue:
        reference = queue.pop()
        if reference not in ended and _ends(_target(schema, reference), ended):
            ended.add(reference)
            queue += dependents[reference]
    return _ends(schema, ended)


def _ends(schema: Any, ended: Collection[str]) -> bool:
    """Whether `schema` allows a finite value if the references in `ended` do."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in ended:
        return False
    if not all(_ends(part, ended) for part in _of(list, schema, "allOf")):
        return False
    for keyword in ("anyOf", "oneOf"):
        parts = _of(list, schema, keyword)
        if parts and not any(_ends(part, ended) for part in parts):
            return False
    return {"object": _object_ends, "array": _array_ends}.get(_only_type(schema), _always)(
        schema, ended
    )


def _only_type(schema: dict[str, Any]) -> str:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], str) else ""


def _object_ends(schema: dict[str, Any], ended: Collection[str]) -> bool:
    properties, others = _of(dict, schema, "properties"), schema.get("additionalProperties", True)
    required = [name for name in _of(list, schema, "required") if isinstance(name, str)]
    if not all(_ends(properties.get(name, others), ended) for name in required):
        return False
    if _number(schema, "minProperties") <= len(required):
        return True
    choices = [*properties.values(), *_of(dict, schema, "patternProperties").values(), others]
    return any(_ends(choice, ended) for choice in choices if choice is not False)


def _array_ends(schema: dict[str, Any], ended: Collection[str]) -> bool:
    count, first = _number(schema, "minItems"), _of(list, schema, "prefixItems")
    wanted = [*first[:count], *([schema.get("items", True)] if count > len(first) else [])]
    return all(_ends(item, ended) for item in wanted)


def _always(schema: dict[str, Any], ended: Collection[str]) -> bool:
    return True


def _of(kind: type[Kind], schema: dict[str, Any], keyword: str) -> Kind:
    """The value of a keyword; empty if of another kind: a reference may lead to any JSON."""
    value = schema.get(keyword)
    return value if isinstance(value, kind) else kind()


def _number(schema: dict[str, Any], keyword: str) -> int:
    value = schema.get(keyword, 0)
    return int(value) if isinstance(value, int | float) and 0 < value < 1e9 else 0


def _references(schema: Any) -> set[str]:
    """Every `$ref` in `schema`, at any depth."""
    found, places = set[str](), [schema]
    while places:
        place = places.pop()
        if isinstance(place, dict):
            if isinstance(place.get("$ref"), str):
                found.add(place["$ref"])
            places += place.values()
        elif isinstance(place, list):
            places += place
    return found


def _target(root: Any, reference: str) -> Any:
    """The target of a JSON pointer such as "#/$defs/a"; True, which allows all, for none."""
    place = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if (
            isinstance(place, list)
            and name.isdecimal()
            and len(name) < 9
            and int(name) < len(place)
        ):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return True
    return place
