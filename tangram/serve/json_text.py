"""JSON as answers have it: where its strings end, and how it is put on one line of a stream."""

from __future__ import annotations

import re

import msgspec

from tangram.serve.body import Json

_ESCAPE_OR_QUOTE = re.compile(r'\\.?|"', re.DOTALL)
# Clients cut streams into lines as Python's `splitlines` does, httpx for one. It knows these ends
# too; JSON itself escapes the others.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


class JsonStrings:
    """Whether a text of JSON that arrives in parts is inside a string at its end."""

    def __init__(self) -> None:
        self.open = False
        self._begun = ""  # an escape of which only the backslash has come

    def read(self, text: str) -> None:
        """Go on with `text`."""
        text, self._begun = self._begun + text, ""
        for found in _ESCAPE_OR_QUOTE.finditer(text):
            if found[0] == '"':
                self.open = not self.open
            elif len(found[0]) == 1:
                self._begun = found[0]


def write_event(kind: str, fields: Json) -> str:
    """An event of a stream that names its `kind`, in its data too."""
    return f"event: {kind}\ndata: {write_line({'type': kind, **fields})}\n\n"


def write_line(data: Json | str) -> str:
    """`data` as JSON on one line, whatever a client takes for the end of a line."""
    text = msgspec.json.encode(data).decode()
    return text if text.isascii() else text.translate(_LINE_ENDS)
