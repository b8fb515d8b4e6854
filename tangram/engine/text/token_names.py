"""Finds names of tokens in a text, in time that does not grow with their number: a model may have
thousands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class TokenNames:
    """The names of control tokens, say. Safe to share between threads."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._lengths = sorted(set(map(len, self._names)), reverse=True)
        first = "".join(re.escape(name[0]) for name in self._names)
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def hide(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of every name, also inside another."""
        return self._first.sub(
            lambda found: found[0] + (mark if self._measure(text, found.start()) else ""), text
        )

    def split(self, text: str) -> list[str]:
        """`text` in parts: every other one is a name, the longest of those that begin there."""
        parts, end = [], 0
        for found in self._first.finditer(text):
            begin = found.start()
            length = self._measure(text, begin) if begin >= end else 0
            if length:
                parts += [text[end:begin], text[begin : begin + length]]
                end = begin + length
        return [*parts, text[end:]]

    def _measure(self, text: str, begin: int) -> int:
        """The length of the longest name at `begin`; 0 for none."""
        return next((n for n in self._lengths if text[begin : begin + n] in self._names), 0)
