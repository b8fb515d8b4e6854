"""The JSON of a request as Python objects: bounded before parsing, without duplicate fields."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from reprlib import repr as shortened
from typing import Any

from tangram.serve.transport.api_errors import ApiError

# Objects, lists and texts, names of fields included: each takes 50 bytes or more once parsed.
MAX_ITEMS = 2**19
_MARK = re.compile(r'\\.|["\[{]', re.DOTALL)


def parse(content: bytes, what: str = "the body") -> Any:
    """The JSON value of these bytes, in UTF-8, UTF-16 or UTF-32. `what` names them in errors.

    Other threads can run meanwhile: every object and number is a step of the interpreter. Raises
    `ApiError` with the fault. Nothing is built if there are more than `MAX_ITEMS`.
    """
    try:
        text = content.decode(json.detect_encoding(content)).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        place = f"its byte {error.start} is not {error.encoding.upper()}"
        raise _invalid(what, f"{place}: send JSON in UTF-8, not compressed") from None
    if has_more_items(text, MAX_ITEMS):
        message = f"{what} has more than {MAX_ITEMS} objects, lists and texts: send less at once"
        raise ApiError(400, message, code="too_many_items")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number)
    except json.JSONDecodeError as error:
        raise _invalid(what, f"{error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise _invalid(what, str(error)) from None
    except RecursionError:
        raise _invalid(what, "it is nested in too many levels") from None


def _invalid(what: str, reason: str) -> ApiError:
    return ApiError(400, f"{what} is not valid JSON: {reason}", code="json_invalid")


def has_more_items(text: str, most: int) -> bool:
    """Whether there are more than `most` objects, lists and texts in this JSON."""
    if text.count("[") + text.count("{") + text.count('"') // 2 <= most:
        return False  # quoted brackets and quotes among them
    items, quoted = 0, False
    for mark in _MARK.finditer(text):
        if mark[0] == '"':
            quoted = not quoted
            items += quoted
        elif not quoted:
            items += 1
        if items > most:
            return True
    return False


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        (twice, _), *_ = Counter(name for name, _ in fields).most_common(1)
        message = f"an object has the field {shortened(twice)} more than once: send it once"
        raise ApiError(400, message, param=twice, code="duplicate_field")
    return found


def _integer(digits: str) -> int:
    most, count = sys.get_int_max_str_digits(), len(digits.removeprefix("-"))
    if 0 < most < count:
        raise ValueError(f"a number has {count} digits, at most {most} are read")
    return int(digits)


def _number(digits: str) -> float:
    return float(digits)  # not `float` itself: a step of the interpreter, see `parse`
