"""The OpenAPI document of the server.

The types of the fields describe what their validators accept. This adds what other modules decide:
the fields that must ask for nothing, the errors, the key, and example requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tangram.serve.api_document.kv_answers import KV_ANSWERS, STRING, record
from tangram.serve.api_document.sample_requests import EXAMPLES, SUMMARIES
from tangram.serve.bodies.body import Body, Json
from tangram.serve.transport.api_errors import is_of_messages
from tangram.serve.transport.guard import OPEN_PATHS
from tangram.serve.transport.static_files import StaticFolder

# A viewer of the document. Its files hold no data, so they need no key.
DOCS = StaticFolder(Path(__file__).parent / "docs", {"/docs": "index.html"}, "/docs/")
_DESCRIPTION = (
    "The OpenAI API, Anthropic's Messages, and what the KV cache holds. Open an endpoint, choose "
    "an example, and execute it. Tools read [openapi.json](/openapi.json)."
)
_NULL: Json = {"type": "null"}
_ERROR, _MESSAGES_ERROR = (
    {"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError")
)
_NO_SERVICE = "the engine has stopped, or the server is shutting down"
_ERRORS = {
    "400": "a wrong, unknown or unsupported field, or a request that can never fit",
    "401": "no API key, or a wrong one",
    "403": "a client that may not see the page's data",
    "404": "another model, another path, or a request or response of another key",
    "408": "a head or a body that took too long to arrive",
    "409": "another request has cancelled or removed the response",
    "413": "a body over the bound",
    "415": "a compressed body",
    "429": "too many requests wait: Retry-After says when to come back",
    "431": "path and headers over the bound",
    "500": "the engine gave up on the request, or a bug",
    "503": f"{_NO_SERVICE}, or a new grammar could not be tried, or stored responses not read",
    "504": "the answer took too long",
}
_ASKING_ERRORS = ("400", "404", "408", "413", "415", "429", "500", "503", "504")
_NULLABLE_STRING: Json = {"type": ["string", "null"]}
_ERROR_SCHEMA = record(
    error=record(
        message=STRING,
        type=STRING,
        param=_NULLABLE_STRING | {"description": "the request field to blame"},
        code=_NULLABLE_STRING,
    )
)
_MESSAGES_ERROR_SCHEMA = record(
    type={"const": "error"}, error=record(type=STRING, message=STRING), request_id=STRING
)


def _object(*required: str) -> Json:
    return {"application/json": {"schema": {"type": "object", "required": list(required)}}}


_EVENT: Json = record(data=STRING)
_EVENTS: Json = {
    "text/event-stream": {"schema": _EVENT | {"description": "one event of the stream"}}
}
_ANSWERS: dict[str, Json] = {
    "/v1/chat/completions": _object("id", "object", "created", "model", "choices", "usage")
    | _EVENTS,
    "/v1/completions": _object("id", "object", "created", "model", "choices", "usage") | _EVENTS,
    "/v1/responses": _object("id", "object", "created_at", "model", "status", "output", "usage")
    | _EVENTS,
    "/v1/responses/{id}": _object("id", "object", "created_at", "model", "status", "output"),
    "DELETE /v1/responses/{id}": _object("id", "object", "deleted"),
    "/v1/responses/{id}/cancel": _object("id", "object", "created_at", "status", "output"),
    "/v1/responses/{id}/input_items": _object("object", "data", "first_id", "last_id", "has_more"),
    "/v1/messages": _object("id", "type", "role", "model", "content", "stop_reason", "usage")
    | _EVENTS,
    "/v1/messages/count_tokens": _object("input_tokens"),
    "/tokenize": _object("tokens", "count", "max_model_len"),
    "/detokenize": _object("prompt"),
    "/v1/models": _object("object", "data"),
    "/v1/models/{model}": _object("id", "object", "max_model_len"),
    "/health": _object("status"),
    "/ready": _object("ready"),
    "/version": _object("version"),
    "/metrics": {"text/plain": {"schema": STRING}},
    **{path: {"application/json": {"schema": answer}} for path, answer in KV_ANSWERS.items()},
    "/v1/kv/events": _EVENTS,
}
# What the web page's endpoints refuse: clients of other machines, and ids of other keys' requests.
_WEB = "/v1/kv/"
_STORED = "/v1/responses/"


def document(app: FastAPI, *, version: str, model: str, locked: bool) -> Json:
    """The OpenAPI document of `app`, which serves `model`; `locked` if it requires API keys."""
    found = get_openapi(
        title=app.title, version=version, description=_DESCRIPTION, routes=app.routes
    )
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for body in _bodies(Body):
        if body.__name__ in schemas:
            _describe_body(body, schemas[body.__name__], model)
    schemas |= {"Error": _ERROR_SCHEMA, "MessagesError": _MESSAGES_ERROR_SCHEMA}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            told = f"DELETE {path}" if method == "delete" else path
            operation["responses"] = _responses(path, operation, _ANSWERS[told], locked)
            operation["tags"] = [tag for tag, texts in SUMMARIES.items() if told in texts]
            operation["summary"] = SUMMARIES[operation["tags"][0]][told]
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                content["examples"] = _examples(path, model)
            for parameter in operation.get("parameters", []):
                parameter["schema"] = _field(parameter["name"], parameter["schema"], model)
            if path.encode() in OPEN_PATHS:
                operation["security"] = []
    if locked:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _examples(path: str, model: str) -> Json:
    """The example requests of an endpoint, by number."""
    return {
        str(number): {"summary": title, "value": {"model": model, **body}}
        for number, (title, body) in enumerate(EXAMPLES[path].items(), 1)
    }


def _bodies(base: type[Body]) -> Iterator[type[Body]]:
    for body in base.__subclasses__():
        yield body
        yield from _bodies(body)


def _describe_body(body: type[Body], schema: Json, model: str) -> None:
    """Add to the schema of `body`: ranges, forms, null defaults, and the unsupported fields."""
    # Pydantic's own: FastAPI rounds the bounds of integers.
    described = body.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    properties, required = schema["properties"], schema.get("required", [])
    for name, found in described.items():
        stated = {key: value for key, value in found.items() if value is not None}
        properties[name] = _field(name, stated, model)
        if name not in required:
            properties[name] = _or_null(properties[name])
    for name, values in body.refused.items():
        words = "not supported: only values that ask for nothing"
        properties[name] = {"enum": [None, *values], "description": words}


def _field(name: str, found: Json, model: str) -> Json:
    return {"type": "string", "const": model} if name == "model" else found


def _or_null(schema: Json) -> Json:
    forms = schema.get("anyOf")
    if forms is not None:
        return schema if _NULL in forms else schema | {"anyOf": [*forms, _NULL]}
    outer = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return outer | {
        "anyOf": [{key: value for key, value in schema.items() if key not in outer}, _NULL]
    }


def _responses(path: str, operation: Json, answer: Json, locked: bool) -> Json:
    """The responses of `operation`, which is to be answered by `answer`."""
    errors = ["431"]
    if "requestBody" in operation:
        errors += _ASKING_ERRORS
    if path == "/v1/models/{model}" or "{id}" in path:
        errors += ["404"]
    if path.startswith(_WEB):
        errors += ["400", "403"]
    if path.startswith(_STORED):
        errors += ["400", "503"]
    if path == "/v1/responses":
        errors += ["409"]
    is_open = path.encode() in OPEN_PATHS
    if locked and not is_open:
        errors += ["401"]
    if path == "/v1/kv/events":
        errors += ["429"]
    answers: Json = {"200": {"description": "the answer", "content": answer}}
    if is_open:  # its 503 says the same in the same form
        answers["503"] = {"description": _NO_SERVICE, "content": answer}
    error = _MESSAGES_ERROR if is_of_messages(path) else _ERROR
    content = {"application/json": {"schema": error}}
    return answers | {
        status: {"description": _ERRORS[status], "content": content} for status in sorted(errors)
    }
