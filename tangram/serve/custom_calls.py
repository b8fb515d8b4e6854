"""Calls of custom tools: the text of their one argument, as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from tangram.serve.calls import ArgumentText, Call
from tangram.serve.structured import INPUT
from tangram.serve.thoughts import Part, Reader
from tangram.types import Piece

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_TEXT = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


class CustomReader:
    """What a reader that `new_reader` makes finds, with calls of the tools `names` as custom."""

    def __init__(self, new_reader: Callable[[], Reader], names: Collection[str]) -> None:
        self._reader, self._names = new_reader(), names
        self._input: _InputText | None = None  # of the call that is open

    @property
    def thinking(self) -> bool:
        """As for every reader."""
        return self._reader.thinking

    @property
    def called(self) -> bool:
        """As for every reader."""
        return self._reader.called

    def push(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The parts that are certain now."""
        return self._convert(self._reader.push(pieces))

    def finish(self) -> Iterator[Part]:
        """What was held back, once the completion has ended."""
        return self._convert(self._reader.finish())

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
