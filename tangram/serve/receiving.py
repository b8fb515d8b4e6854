"""Reads request bodies: parsed and validated, the large ones on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from reprlib import repr as shortened
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from tangram.serve.bodies.body import Body
from tangram.serve.bodies.unsupported import IgnoredFields
from tangram.serve.endpoints import AnswerRequest
from tangram.serve.service import Service
from tangram.serve.transport.api_errors import ApiError, of_validation
from tangram.serve.transport.parsing import parse

# A smaller body takes milliseconds, whatever is in it.
_SMALL_BYTES = 65_536


class BodyRoute(APIRoute):
    """A route whose body is validated before FastAPI sees it.

    The application's `state.service` has the threads for that.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request."""
        answer, field = super().get_route_handler(), self.body_field
        kind = None if field is None else field.field_info.annotation
        if not (isinstance(kind, type) and issubclass(kind, Body)):
            return answer

        async def read_and_answer(request: Request) -> Response:
            body = await _read(request, kind, request.app.state.service)
            return await answer(_ReadRequest(request, body))

        return read_and_answer


class _ReadRequest(Request):
    """A request whose body was validated. FastAPI passes on what already has the right type."""

    def __init__(self, request: Request, read: Body) -> None:
        super().__init__(request.scope, request.receive)
        self._read = read

    async def body(self) -> bytes:
        """A placeholder: FastAPI asks whether there is a body, and ours is not kept."""
        return b"{}"

    async def json(self) -> Body:
        """The validated body."""
        return self._read


async def _read(request: Request, kind: type[Body], service: Service) -> Body:
    """The body of `request`. Raises `ApiError` with what is wrong with it.

    A large body is not parsed while the engine's queue is full, if it asks for completions.
    """
    try:
        content = b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    _check_headers(request)
    if len(content) <= _SMALL_BYTES:
        return _validate(kind, content, service.ignored)
    if kind in get_args(AnswerRequest):
        service.engine.check_queue(1)
    parse_large, ignored = service.preparation.parser.run, service.ignored
    return await service.preparation.of(request, parse_large, _validate, kind, content, ignored)


def _validate(kind: type[Body], content: bytes, ignored: IgnoredFields | None) -> Body:
    if not content:
        raise ApiError(400, "the body is empty: send a JSON object", code="json_invalid")
    try:
        return kind.model_validate(parse(content), context=ignored)
    except ValidationError as error:
        found = of_validation(error)
    # Raised outside the `except`, so the parsed body is freed now and not after the response.
    raise found


def _check_headers(request: Request) -> None:
    """Raise `ApiError` for a body that is not declared as JSON, or is compressed."""
    given = request.headers.get("content-type", "")
    head = Message()
    head["content-type"] = given
    kind = head.get_content_subtype()
    if head.get_content_maintype() != "application" or not (
        kind == "json" or kind.endswith("+json")
    ):
        found = f"is {shortened(given)}" if given else "is missing"
        message = (
            f"the header Content-Type {found}: send the body as JSON, with Content-Type: "
            "application/json"
        )
        raise ApiError(400, message, code="invalid_content_type")
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        message = (
            f"the header Content-Encoding is {shortened(coding)}: send the body as it is, not "
            "compressed"
        )
        raise ApiError(415, message, code="unsupported_content_encoding")
