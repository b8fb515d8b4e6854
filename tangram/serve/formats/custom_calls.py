"""Calls of custom tools: the text of their one argument, as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from tangram.serve.bodies.structured import INPUT
from tangram.serve.formats.calls import ArgumentText, Call
from tangram.serve.formats.thoughts import Part, PartConverter, Reader

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_TEXT = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


class CustomReader(PartConverter):
    """What a reader that `new_reader` makes finds, with calls of the tools `names` as custom."""

    def __init__(self, new_reader: Callable[[], Reader], names: Collection[str]) -> None:
        super().__init__(new_reader())
        self._names = names
        self._input: _InputText | None = None  # of the call that is open

    def _convert(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Call):
                custom = part.name in self._names
                self._input = _InputText() if custom else None
                yield replace(part, custom=custom)
            elif isinstance(part, ArgumentText) and self._input is not None:
                text = self._input.read(part.text)
                if text or part.last:
                    yield ArgumentText(text, part.last, custom=True)
            else:
                yield part


class _InputText:
    """The text in `{"input": "..."}`, of which the pieces cut no escape."""

    def __init__(self) -> None:
        self._held, self._begun, self._ended = "", False, False

    def read(self, piece: str) -> str:
        """What `piece` adds to the text."""
        if not self._begun:
            self._held += piece
            head = _HEAD.match(self._held)
            self._begun, piece = head is not None, "" if head is None else self._held[head.end() :]
        found = None if self._ended else _TEXT.match(piece)
        if found is None:
            return ""
        self._ended = found.end() < len(piece)
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text
