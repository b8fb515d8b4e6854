"""Fields that this server does not serve, where it was told to let them by: counted, and logged
once a name.

Without that a body refuses them (`tangram/serve/body.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from tangram.serve.unsupported import KNOWN_ELSEWHERE, NoOps, asks_for_nothing

# Names come from clients: neither the log nor the memory of what it has said may grow with them.
_MOST_LOGGED = 100
_MOST_NAME_CHARACTERS = 64
_log = logging.getLogger(__name__)


class IgnoredFields:
    """What was let by so far. `counter` has one label, the field's name; those nobody knows share
    `other`.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """A request has asked for something by this field, and does not get it."""
        self._counter.labels(name if name in KNOWN_ELSEWHERE else "other").inc()
        shown = name[:_MOST_NAME_CHARACTERS]
        if shown not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(shown)
            _log.warning(
                "requests have the field %r, which is not served here: it is ignored", shown
            )


# Pydantic has no other way to hand something to validators that FastAPI calls.
_here: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


@contextmanager
def letting_by(ignored: IgnoredFields) -> Iterator[None]:
    """Bodies that are validated inside lose the fields that are not served, and `ignored` hears of
    them.
    """
    token = _here.set(ignored)
    try:
        yield
    finally:
        _here.reset(token)


def without_unknown(body: dict[str, Any], known: Container[str], refused: NoOps) -> dict[str, Any]:
    """`body` without the fields that would be refused, where these are let by; else as it is."""
    ignored = _here.get()
    if ignored is None:
        return body
    unserved = {
        name
        for name, value in body.items()
        if (not asks_for_nothing(value, refused[name]) if name in refused else name not in known)
    }
    for name in unserved:
        ignored.note(name)
    return {name: value for name, value in body.items() if name not in unserved}


class LetUnknownFieldsBy:
    """The layer that lets them by, for every request."""

    def __init__(self, app: ASGIApp, ignored: IgnoredFields) -> None:
        self._app, self._ignored = app, ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        with letting_by(self._ignored):
            await self._app(scope, receive, send)
