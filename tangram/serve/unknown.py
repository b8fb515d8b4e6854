"""Unsupported fields where the server was told to ignore them: counted, and logged once a name.

Otherwise a body refuses them (`tangram/serve/body.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

from prometheus_client import Counter

from tangram.serve.unsupported import KNOWN_ELSEWHERE, NoOps, asks_for_nothing

# Clients choose the names, so the number and the length of those kept are bounded.
_MOST_LOGGED = 100
_MOST_NAME_CHARACTERS = 64
_log = logging.getLogger(__name__)


class IgnoredFields:
    """The fields that were ignored so far.

    `counter` has one label, the field's name. Unknown names share the label `other`.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """Enter a field that a request has set and that was ignored."""
        self._counter.labels(name if name in KNOWN_ELSEWHERE else "other").inc()
        shown = name[:_MOST_NAME_CHARACTERS]
        if shown not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(shown)
            _log.warning(
                "requests have the field %r, which is not served here: it is ignored", shown
            )


def without_unknown(
    body: dict[str, Any], known: Container[str], refused: NoOps, ignored: IgnoredFields | None
) -> dict[str, Any]:
    """`body` without unsupported fields, which `ignored` counts; with None unchanged."""
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
