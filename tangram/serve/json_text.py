"""JSON as answers have it: where its strings end, and how it is put on one line of a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tangram.serve.body import Json

# Clients cut streams into lines as Python's `splitlines` does, httpx for one. It knows these ends
# too; JSON itself escapes the others.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def refuse_constant(constant: str) -> float:
    """For `parse_constant` of `json`: raises `ValueError`, for JSON has no NaN and no infinity."""
    raise ValueError(f"{constant} is no JSON")


class QuotedTexts:
    """Whether a text that arrives in parts is inside a quoted text at its end.

    JSON's texts are between double quotes, others between any one of `quotes`. A backslash escapes
    the character after it, unless quotes are longer than one character.
    """

    def __init__(self, quotes: Sequence[str] = ('"',)) -> None:
        escape = [r"\\.?"] if all(len(quote) == 1 for quote in quotes) else []
        self._marks = re.compile("|".join([*escape, *map(re.escape, quotes)]), re.DOTALL)
        self._quote = ""
        self._begun = ""  # an escape of which only the backslash has come

    @property
    def open(self) -> bool:
        """Whether the end is inside."""
        return bool(self._quote)

    def read(self, text: str) -> None:
        """Go on with `text`, which cuts no quote."""
        text, self._begun = self._begun + text, ""
        for found in self._marks.finditer(text):
            if found[0] == self._quote:
                self._quote = ""
            elif not found[0].startswith("\\"):
                self._quote = self._quote or found[0]
            elif len(found[0]) == 1:
                self._begun = found[0]


def write_event(kind: str, fields: Json) -> str:
    """An event of a stream that names its `kind`, in its data too."""
    return f"event: {kind}\ndata: {write_line({'type': kind, **fields})}\n\n"


def write_line(data: Json | str) -> str:
    """`data` as JSON on one line, whatever a client takes for the end of a line."""
    text = msgspec.json.encode(data).decode()
    return text if text.isascii() else text.translate(_LINE_ENDS)
