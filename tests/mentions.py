"""What a text for users must tell, whatever its words are: fields, values, limits, remedies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


def mentioning(facts: str) -> str:
    """A pattern of texts with each of the `facts`, which spaces part, as a whole word anywhere.

    What belongs to a name or a number is no word's end: `3` is not in `0.3`, `-3`, `3.5` or `a3`.
    """
    return r"(?s)\A" + "".join(
        rf"(?=.*(?<![\w.-]){re.escape(fact)}(?!\w|[.-]\w))" for fact in facts.split()
    )


def mentions(text: str, facts: str) -> bool:
    return re.search(mentioning(facts), text) is not None


def assert_refused(
    response: httpx.Response, param: str | None, facts: str = ""
) -> dict[str, str | None]:
    """The error of a 400 that blames `param`, with `facts` in its code or its text."""
    error: dict[str, str | None] = response.json()["error"]
    told = (response.status_code, error["type"], error["param"])
    assert told == (400, "invalid_request_error", param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert mentions(f"{error['code']} {error['message']}", facts), error
    return error
