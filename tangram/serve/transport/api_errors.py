"""Every error of the server in the OpenAI form: {"error": {"message", "type", "param", "code"}}.

Below /v1/messages it is in Anthropic's: {"type": "error", "error": {"type", "message"},
"request_id"}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from tangram.errors import EngineError, MachineError, OverloadError, RequestError
from tangram.serve.bodies.body import ALTERNATIVE
from tangram.serve.bodies.unsupported import not_served
from tangram.serve.observability.record import record_in

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Pydantic's error types for a value that is no object, and its place of a wrong key.
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
_OF_A_LIBRARY, _SCALARS = "Input should be", (str, int, float)  # texts without the value
_OF_A_KEY = ("[key]",)
_MAX_MESSAGE_CHARACTERS = 1000  # messages quote the client, who may send millions of characters


_MESSAGES = "/v1/messages"
# Where Anthropic's names of errors are others.
_MESSAGES_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def is_of_messages(path: str) -> bool:
    """Whether clients of Anthropic's API ask at `path`."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


class ApiError(Exception):
    """An error on its way to the client; `param` is the request field to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body, also sent as an event when a stream fails half way."""
        param = None if self.param is None else _shorten(self.param)
        return {
            "error": {
                "message": _shorten(str(self)),
                "type": self._name_type(_TYPES, "server_error"),
                "param": param,
                "code": self.code,
            }
        }

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """The same in Anthropic's form."""
        kind = self._name_type(_TYPES | _MESSAGES_TYPES, "api_error")
        message = str(self)
        if self.param is not None and self.param not in message:  # there is no other place for it
            message = f"{self.param}: {message}"
        error: dict[str, Any] = {"type": kind, "message": _shorten(message)}
        if self.param == "thread":  # told so, Anthropic's clients send whole conversations instead
            code = "thread_unsupported_request"
            error["details"] = {"error_code": code, "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": request_id}

    def _name_type(self, named: Mapping[int, str], fault: str) -> str:
        return named.get(self.status, "invalid_request_error" if self.status < 500 else fault)

    def response(
        self, headers: Mapping[str, str] | None = None, scope: Scope | None = None
    ) -> Response:
        """The response, in the form of the path of `scope`.

        It is in ASCII: a message may quote text that UTF-8 cannot spell.
        """
        if scope is not None and is_of_messages(scope["path"]):
            body = self.messages_body(record_in(scope).request_id)
        else:
            body = self.body()
        content = json.dumps(body).encode("ascii")
        return Response(content, self.status, dict(headers or {}), media_type="application/json")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else f"{text[:_MAX_MESSAGE_CHARACTERS]}…"


def _field_path(location: Sequence[str | int]) -> str:
    """('messages', 0, 'content') as `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, str) and part.startswith(ALTERNATIVE):
            continue
        name = part or '""'
        path += f"[{part}]" if isinstance(part, int) else f".{name}" if path else str(name)
    return path


def _describe(error: Mapping[str, Any], rename: Callable[[str], str]) -> ApiError:
    """One pydantic error for the client, with the fields renamed."""
    location = tuple(error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "wrong_field":
        return ApiError(
            400,
            message,
            param=rename(_field_path((*location, error["ctx"]["field"]))),
            code="invalid_value",
        )
    if error["type"] in _NO_OBJECT:
        message = "must be a JSON object (a dictionary)"
    elif message.startswith(_OF_A_LIBRARY) and isinstance(error["input"], _SCALARS):
        given = error["input"]
        message += f", it is {json.dumps(given) if isinstance(given, bool) else shortened(given)}"
    if location[-1:] == _OF_A_KEY:
        message, location = f"the key {shortened(location[-2])}: {message}", location[:-2]
    param = rename(_field_path(location)) or None
    if error["type"] == "extra_forbidden":
        message = f"unknown field '{param}': correct its name or leave it out"
        return ApiError(400, message, param=param, code="unknown_field")
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code="invalid_value")


def _nowhere(request: Request, status: int, detail: str) -> ApiError:
    """The error for an unknown path, or a method that it has not, with what the client may mean."""
    # `request.url` is made of the Host header too, which may be anything.
    method, path = request.method, request.scope["path"]
    meant = f"/v1/{path.rpartition('/v1/')[2].removeprefix('/')}"
    if meant != path and any(getattr(route, "path", None) == meant for route in request.app.routes):
        end = "before" if is_of_messages(meant) else "in"
        advice = f"end the client's base URL {end} /v1"
        return ApiError(status, f"{method} {path}: {detail}; {meant} is there: {advice}")
    missing = not_served(path)
    if missing is None:
        where = "; /docs has what there is" if status == 404 else ""
        return ApiError(status, f"{method} {path}: {detail}{where}")
    wrong = "" if status == 404 else f"{detail}; "
    message = (
        f"{method} {path}: {wrong}this server generates text, {missing} it does not serve; /docs "
        "has what there is"
    )
    return ApiError(status, message, code="endpoint_not_supported")


def of_validation(error: ValidationError, rename: Callable[[str], str] = str) -> ApiError:
    """The first fault that a schema found, for the client.

    `rename` maps the schema's names of fields to the client's, where these differ.
    """
    return _describe(error.errors(include_url=False)[0], rename)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`; of a fault of the server's code, that it has a fault."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return of_validation(error)
        case RequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case RequestValidationError():  # of the query
            first = error.errors()[0]
            return _describe({**first, "loc": first["loc"][1:]}, str)
        case OverloadError():
            return ApiError(429, str(error), code=error.code)
        case MachineError() | EngineError():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, "internal error: the server's log has the details")


def _answer(request: Request, error: Exception) -> Response:
    wait_s = error.retry_after_s if isinstance(error, OverloadError) else None
    headers = None if wait_s is None else {"Retry-After": str(wait_s)}
    return as_api_error(error).response(headers, request.scope)


def _answer_http(request: Request, error: HTTPException) -> Response:
    if error.status_code in (404, 405):
        found = _nowhere(request, error.status_code, error.detail)
    else:
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        found = ApiError(error.status_code, message)
    return found.response(error.headers, request.scope)


def install_handlers(app: FastAPI) -> None:
    """Have `app` answer every failure in the form of its path."""
    expected = (ApiError, RequestError, OverloadError, MachineError, EngineError)
    for kind in (*expected, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _answer_http)  # type: ignore[arg-type]
