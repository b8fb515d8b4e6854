"""Checks before any route: an API key, bounds on size, and a response to any failure."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tangram.errors import ConfigError
from tangram.foreign_files import is_text
from tangram.serve.observability.record import record_in
from tangram.serve.transport.api_errors import ApiError, is_of_messages

MAX_HEADER_BYTES = 32 * 1024
OPEN_PATHS = (b"/health", b"/ready")
# The absolute form of a target (RFC 9112, 3.2.2) up to its path. Proxies send it. The host in it
# has no effect, like the header `Host`.
_HOST_OF_TARGET = re.compile(rb"https?://[^/]+", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_log = logging.getLogger(__name__)


def check_api_keys(api_keys: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises `ConfigError` if a key is empty, or cannot be sent."""
    for number, key in enumerate(api_keys, 1):
        if not key or any(character.isspace() for character in key):
            raise ConfigError(
                f"api_key number {number} is empty or has spaces: give one without, or leave it out"
            )
        if not is_text(key):
            raise ConfigError(
                f"api_key number {number} has bytes that are not UTF-8: choose another key"
            )
    return api_keys


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises `ConfigError` for an origin that browsers do not send; `*` is every page."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed_origins has {origin!r}, it must be * or SCHEME://HOST, with :PORT where "
                "it is not the scheme's own, in small letters and without a path: give it as "
                "browsers send it"
            )
    return origins


def check_served_name(name: str) -> None:
    """Raise `ConfigError` unless `name` can stand in requests, answers and the log."""
    if not name.strip() or not is_text(name) or name.splitlines() != [name]:
        raise ConfigError(
            f"served_model_name is {name!r}, it must be a text that is not empty and has no line "
            "breaks: choose another"
        )


class RequireKeys:
    """Refuses requests without one of the keys, on every path but /health, /ready and open ones.

    It decides before the body is read, from the path as it came. Any other spelling of an open path
    needs a key. Clients of Anthropic's API may send theirs as `x-api-key`. The request's record
    gets the digest of its key.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Iterable[str], is_open: Callable[[bytes], bool]
    ) -> None:
        self._app, self._digests = app, [sha256(key.encode()).digest() for key in api_keys]
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "lifespan" or self._lets_in(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            or_so = ", or 'x-api-key'," if is_of_messages(scope["path"]) else ""
            message = f"send 'Authorization: Bearer'{or_so} with this server's API key"
            error = ApiError(401, message, code="invalid_api_key")
            await error.response({"WWW-Authenticate": "Bearer"}, scope)(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        path = scope.get("raw_path") if scope["type"] == "http" else None
        if path is not None and (path in OPEN_PATHS or self._is_open(path)):
            return True
        digest = self._find_key(scope)
        if digest is not None and scope["type"] == "http":
            record_in(scope).key_digest = digest
        return digest is not None

    def _find_key(self, scope: Scope) -> bytes | None:
        """The digest of the key in the headers, if it is one of this server's."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given and is_of_messages(scope["path"]):
            keys = (value for name, value in scope["headers"] if name == b"x-api-key")
            given = [b"bearer " + value for value in keys]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = sha256(key.strip()).digest()
        # Compare with all keys, and compare digests: the time taken says nothing about a key.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) and scheme.lower() == b"bearer" else None


class BoundRequests:
    """Refuses headers over `MAX_HEADER_BYTES` (431) and bodies over `max_body_bytes` (413),
    declared or counted.

    Passes others on in the form that routes know: HEAD becomes GET (RFC 9110, 9.3.2), and uvicorn
    leaves out the content.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413 or 431."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_head(scope)
        except ApiError as error:
            await error.response(scope=scope)(scope, receive, send)
            return
        read_bytes = 0

        async def counting_receive() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes > self._max_body_bytes:
                # FastAPI lets this exception through while it reads.
                raise HTTPException(413, self._too_large("more"))
            return message

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if host := _HOST_OF_TARGET.match(scope.get("raw_path", b"")):
            path = scope["raw_path"][host.end() :] or b"/"
            scope = {**scope, "raw_path": path, "path": unquote(path.decode("ascii"))}
        await self._app(scope, counting_receive, send)

    def _check_head(self, scope: Scope) -> None:
        headers = scope["headers"]
        head_bytes = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
        head_bytes += sum(len(name) + len(value) for name, value in headers)
        if head_bytes > MAX_HEADER_BYTES:
            message = (
                f"the headers have {head_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed: "
                "send fewer"
            )
            raise ApiError(431, message)
        declared = dict(headers).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            raise ApiError(413, self._too_large(declared[:20].decode()))

    def _too_large(self, size: str) -> str:
        return (
            f"the body has {size} bytes, at most {self._max_body_bytes} are allowed: send less, or "
            "have the server started with a larger --max-body-mb"
        )


class NameRequests:
    """Adds the header `x-request-id` to every response, and answers 500 if a request raises.

    Clients of Anthropic's API find it as `request-id`, too. The log has the exception.
    `RecordRequests` must be around it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; answer 500 if it raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started = record_in(scope).request_id, False
        names = [b"x-request-id", *([b"request-id"] if is_of_messages(scope["path"]) else [])]

        async def naming_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                named = ((name, request_id.encode()) for name in names)
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        try:
            await self._app(scope, receive, naming_send)
        except Exception:
            _log.exception("request %s failed", request_id, extra={"request_id": request_id})
            if started:
                raise  # half an answer is out: only cutting the connection tells the client
            error = ApiError(
                500, f"internal error: the server's log has the details of request {request_id}"
            )
            await error.response(scope=scope)(scope, receive, naming_send)
