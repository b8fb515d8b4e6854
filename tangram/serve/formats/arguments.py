"""Writes the arguments of a call as JSON: piece by piece, while a model writes them in its form.

Pieces are final: joined they are the arguments, wherever the text was cut.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any


class CallArguments(ABC):
    """The arguments of one call, `whole` once they have ended.

    What is not of the form makes them `broken`: they stay as they are. Of both, `rest` is the text
    after them.
    """

    def __init__(self) -> None:
        self.whole, self.broken, self.rest = False, False, ""

    @abstractmethod
    def push(self, text: str) -> str:
        """Go on with `text`; returns what is certain now and was not returned before."""

    def _stop(self, rest: str, *, whole: bool) -> None:
        self.whole, self.broken, self.rest = whole, not whole, rest


# Half a surrogate pair is no text that UTF-8 can spell; what may still become an escape or a pair.
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_LONE = re.compile(rf"{_HIGH}|{_LOW}")
_HALF = re.compile(
    rf"\\(?:u{_HEX}{{0,3}})?|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?", re.DOTALL
)
_SPELLED = "\\ufffd"


class JsonArguments(CallArguments):
    """An object that is written in JSON, as it is written. A `mark` outside of texts breaks it.

    Only half a surrogate pair, which clients could not send back, becomes U+FFFD.
    """

    def __init__(self, mark: str = "") -> None:
        super().__init__()
        self._mark, self._held = mark, ""
        marks = [re.escape(mark)] if mark else []
        escapes = rf"{_HIGH}{_LOW}", rf"\\u{_HEX}{{4}}", r"\\.?"
        self._marks = re.compile("|".join([*marks, *escapes, r'["{}\[\]]']), re.DOTALL)
        self._quoted, self._level = False, 0

    def push(self, text: str) -> str:
        """As for all arguments."""
        text, self._held, written, begun = self._held + text, "", list[str](), 0
        end = len(text)
        for found in self._marks.finditer(text):
            said = found[0]
            if said == '"':
                self._quoted = not self._quoted
            elif said[0] == "\\":
                if _HALF.fullmatch(text, found.start()):
                    end = found.start()
                    break
                if _LONE.fullmatch(said):
                    written += [text[begun : found.start()], _SPELLED]
                    begun = found.end()
            elif not self._quoted and self._ends(said):
                end = found.end() if self._level == 0 else found.start()
                self._stop(text[end:], whole=self._level == 0)
                break
        else:
            end -= 0 if self._quoted else mark_overlap(text, self._mark)
        if not (self.whole or self.broken):
            self._held = text[end:]  # it is read again
            self._level -= 0 if self._quoted else self._held.count("[")
        return "".join([*written, text[begun:end]])

    def _ends(self, said: str) -> bool:
        """Whether the object ends after this bracket, or is broken by this mark."""
        if said == self._mark:
            return True
        self._level += 1 if said in "{[" else -1
        return self._level == 0


def refuse_constant(constant: str) -> float:
    """For `parse_constant` of `json`: raises `ValueError`, for JSON has no NaN and no infinity."""
    raise ValueError(f"{constant} is no JSON")


def write_json(value: Any) -> str | None:
    """`value` as JSON; None if JSON or UTF-8 cannot spell it.

    JSON has no infinity, which 1e999 is read as, and UTF-8 no half of a surrogate pair.
    """
    with suppress(ValueError, RecursionError):
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
        return written
    return None


def mark_overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark` and is shorter than it."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)


def escape_text(text: str) -> str:
    """`text` as it is inside a text of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
