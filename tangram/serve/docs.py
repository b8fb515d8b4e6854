"""GET /docs: the OpenAPI document as a page, without scripts and requests to other hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from tangram.serve.body import Json

PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;"
    "padding:.3rem .6rem;border-bottom:1px solid #ddd}"
    "code{font:14px ui-monospace,monospace;overflow-wrap:anywhere}summary{cursor:pointer}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
    "td,th{border-color:#444}a{color:#8cf}}"
)
_REFERENCE = "#/components/schemas/"


def page(document: Json) -> str:
    """The page of `document`, as `tangram.serve.openapi.document` makes it."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    key = (
        " Requests carry an API key: <code>Authorization: Bearer …</code>."
        if document.get("security")
        else ""
    )
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>",
        (
            f"<h1>{title}</h1><p>The OpenAI API; <a href=openapi.json>openapi.json</a> is this "
            "page "
            f"for tools.{key}</p>"
        ),
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _endpoint(path, method, operation)
    parts.append("<h1>Bodies</h1>")
    for name, schema in schemas.items():
        if "properties" in schema:
            parts += _body(name, schema)
    return "".join(parts)


def _endpoint(path: str, method: str, operation: Json) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"<p>Body: {_type(schema)}</p>"
    yield "<details><summary>Answers</summary><table>"
    for status, answer in operation["responses"].items():
        yield f"<tr><td><code>{status}</code><td>{escape(answer['description'])}"
    yield "</table></details>"


def _body(name: str, schema: Json) -> Iterator[str]:
    yield (
        "<h2 "
        f"id={escape(name, quote=True)}>{escape(name)}</h2><table><tr><th>field<th>type<th>meaning"
    )
    unserved, required = [], schema.get("required", [])
    for field, found in schema["properties"].items():
        said = _describe(found)
        if said.startswith("not supported"):
            unserved.append(f"<code>{escape(field)}</code>")
            continue
        default = "required" if field in required else _default(found)
        meaning = "; ".join(part for part in (escape(said), default) if part)
        yield f"<tr><td><code>{escape(field)}</code><td>{_type(found)}<td>{meaning}"
    yield "</table>"
    if unserved:
        yield f"<p>Not supported, they may only ask for nothing: {', '.join(unserved)}.</p>"


def _describe(schema: Json) -> str:
    """Its description, or that of one of its alternatives."""
    return next(
        (
            str(form["description"])
            for form in (schema, *schema.get("anyOf", ()))
            if "description" in form
        ),
        "",
    )


def _default(schema: Json) -> str:
    default = schema.get("default")
    return "" if default is None else f"default <code>{escape(json.dumps(default))}</code>"


def _type(schema: Any) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REFERENCE), quote=True)
        return f"<a href='#{name}'>{name}</a>"
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return " or ".join(dict.fromkeys(map(_type, forms)))
    values = (
        schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return escape(kind) + _range(schema)


def _range(schema: Json) -> str:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None and high is None:
        return ""
    bracket = "(" if "exclusiveMinimum" in schema else "["
    return f" in {bracket}{low if low is not None else '−∞'}, {high if high is not None else '∞'}]"
