"""Finds thoughts in an answer: between marks before the answer, or on a channel."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tangram.engine.text.answer_text import spell
from tangram.serve.formats.arguments import JsonArguments, mark_overlap
from tangram.serve.formats.calls import ArgumentText, Call, CallPart
from tangram.types import Mark, Piece, ThinkingFormat


@dataclass(frozen=True)
class Thought:
    """A thought of the model before its answer."""

    text: str


Part = CallPart | Thought


class Reader(Protocol):
    """Splits one completion into parts as it arrives."""

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought, as far as is known."""

    @property
    def called(self) -> bool:
        """Whether there was a call, and the last one is whole."""

    def push(self, pieces: Iterable[Piece]) -> Iterable[Part]:
        """The parts that are certain now."""

    def finish(self) -> Iterable[Part]:
        """What was held back, once the completion has ended."""


class PartConverter(ABC):
    """The parts that another `reader` finds, each as `_convert` makes it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

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

    @abstractmethod
    def _convert(self, parts: Iterable[Part]) -> Iterator[Part]: ...


class TextReader:
    """An answer of which all is text."""

    thinking, called = False, False

    def push(self, pieces: Iterable[Piece]) -> Iterable[Part]:
        """The text itself."""
        return (spell(pieces),)

    def finish(self) -> Iterable[Part]:
        """Nothing is held back."""
        return ()


class ThoughtReader:
    """A thought between marks, then the rest, which a reader made by `rest` reads.

    Only the beginning of an answer can be a thought. Spaces around a thought belong to its marks.
    With `opened` the prompt has opened the thought; the mark may come again.
    """

    def __init__(
        self, form: ThinkingFormat, *, opened: bool, rest: Callable[[], Reader] | None
    ) -> None:
        self._form, self._rest = form, None if rest is None else rest()
        self._held, self._begun, self._gap = "", False, False
        self.thinking = opened

    @property
    def called(self) -> bool:
        """As for every reader."""
        return self._rest is not None and self._rest.called

    def push(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += spell(pieces)
        if not self._begun and not self._begin():
            return
        if self.thinking:
            yield from self._think()
        if not self.thinking:
            yield from self._answer()

    def finish(self) -> Iterator[Part]:
        """What was held back, once the completion has ended."""
        held, self._held = self._held, ""
        if self.thinking and held.strip():
            yield Thought(held.strip() if self._gap else held.rstrip())
        elif not self.thinking and not self._gap:
            yield from self._read_answer(held)
        if self._rest is not None:
            yield from self._rest.finish()

    def _begin(self) -> bool:
        """Whether the beginning of the answer is known."""
        start = self._held.lstrip()
        if self._form.begin.startswith(start) and start != self._form.begin:
            return False
        self._begun = True
        if start.startswith(self._form.begin):
            self.thinking, self._held = True, start[len(self._form.begin) :]
        self._gap = self.thinking
        return True

    def _think(self) -> Iterator[Thought]:
        if self._gap:
            self._held = self._held.lstrip()
            self._gap = not self._held
        end = self._held.find(self._form.end)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(self._form.end) :]
            self.thinking, self._gap = False, True
        else:
            before = self._held[: len(self._held) - mark_overlap(self._held, self._form.end)]
            thought = before.rstrip()
            self._held = self._held[len(thought) :]
        if thought:
            yield Thought(thought)

    def _answer(self) -> Iterator[Part]:
        if self._gap:
            self._held = self._held.lstrip()
            self._gap = not self._held
        held, self._held = self._held, ""
        yield from self._read_answer(held)

    def _read_answer(self, text: str) -> Iterator[Part]:
        if self._rest is not None:
            yield from self._rest.push([text])
        elif text:
            yield text


# Each mark while it is read: half a surrogate pair, which no text of a tokenizer has.
_BEGIN, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN, _START = map(chr, range(0xD800, 0xD807))
_NAMES = {
    _BEGIN: "<|channel|>",
    _CONSTRAIN: "<|constrain|>",
    _MESSAGE: "<|message|>",
    _END: "<|end|>",
    _CALL: "<|call|>",
    _RETURN: "<|return|>",
    _START: "<|start|>",
}
_READ_AS = {name: mark for mark, name in _NAMES.items()}
_SPELLED = str.maketrans(_NAMES)
_ENDS = (_END, _CALL, _RETURN, _START)
_TO = rf"\bto=(?:functions\.)?([^\s{_BEGIN}-{_START}]+)"
_CHANNEL, _RECIPIENT = re.compile(rf"{_BEGIN}\s*(\w*)"), re.compile(_TO)
_KIND = rf"(?:\w+\s*)?(?:{_CONSTRAIN}\s*\w*\s*)?"  # of the text: `json`, say
_HEAD = re.compile(rf"\s*(?:{_TO}\s*)?(?:{_CHANNEL.pattern}\s*(?:{_TO}\s*)?{_KIND})?")
_HEAD_PARTS = re.compile(rf"{_CHANNEL.pattern}|{_TO}|{_CONSTRAIN}")
_MOST_HEAD = 256
_THOUGHTS, _ROLE = "analysis", "assistant"


class ChannelReader:
    """Messages of GPT-OSS (Harmony): `<|channel|>`, its name, `<|message|>`, the text, `<|end|>`.

    The channel `analysis` is thought. A message to one of the functions `names` is a call.
    Everything else is text, also what is outside a message, words that do not belong in a head, and
    the names of marks spelled by ordinary tokens. Thoughts of several messages are joined by line
    breaks, and so are texts.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held, self._head, self._recipient = "", True, ""
        self._role = ""  # the prompt has it; after `<|start|>` the model writes it
        self._stops: tuple[str, ...] = _ENDS
        self._fresh, self._spoken = True, {True: False, False: False}
        self._arguments: JsonArguments | None = None
        self._gap: str | None = None  # the last spaces behind the arguments, if words came there
        self.thinking, self.called = False, False

    def push(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The parts that are certain now."""
        for piece in pieces:
            self._held += _READ_AS[piece.name] if isinstance(piece, Mark) else piece
        going = True
        while going:
            going = yield from (self._read_head() if self._head else self._read_text())

    def finish(self) -> Iterator[Part]:
        """What was held back. The head of a message without text is dropped."""
        held, self._held = self._held, ""
        if not self._head:
            yield from self._part(held)
        elif _find_first(held, _NAMES) is not None:
            yield from self._part(self._list_words(held))
        elif not self._role or not self._role.startswith(held.strip()):
            yield from self._part(held)

    def _read_head(self) -> Generator[Part, None, bool]:
        """Read a head that is whole. Returns whether there may be more to read."""
        held = self._held
        first, last = _find_first(held, _NAMES), _find_first(held, (_MESSAGE, *_ENDS))
        begun = self._may_begin(held if first is None else held[:first])
        if not begun or (len(held) if last is None else last) > _MOST_HEAD:
            # Text without a head, up to where one begins: not at the mark of what is no head.
            if begun and first is not None and held[first] == _BEGIN and first <= _MOST_HEAD:
                self._held = held[:first] + held[first + 1 :]
            self._head, self._stops = False, (_BEGIN, _MESSAGE, *_ENDS)
            return True
        if last is None:
            return False
        head, mark, self._held = held[:last], held[last], held[last + 1 :]
        yield from self._part(self._list_words(head))
        if mark != _MESSAGE:
            self._end(mark)
            return True
        channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._recipient = "" if to is None else to[1]
        self.thinking = channel is not None and channel[1] == _THOUGHTS and to is None
        self._head, self._fresh, self._stops = False, True, _ENDS
        return True

    def _may_begin(self, text: str) -> bool:
        """Whether `text`, before any mark, may be the beginning of a head."""
        words = text.split()
        if self._role and words and self._role.startswith(words[0]):
            if words[0] != self._role:
                return len(words) == 1
            del words[0]
        return not words or (len(words) == 1 and "to=".startswith(words[0][:3]))

    def _list_words(self, head: str) -> str:
        """What in `head` does not belong in a head."""
        head = head.lstrip().removeprefix(self._role) if self._role else head
        return "" if _HEAD.fullmatch(head) else _HEAD_PARTS.sub("", head)

    def _read_text(self) -> Generator[Part, None, bool]:
        """Read text up to its end. Returns whether there may be more to read."""
        end = _find_first(self._held, self._stops)
        body = self._held if end is None else self._held[:end]
        if self._recipient and body.strip():
            if self._recipient in self._names and body.lstrip()[0] == "{":
                self._arguments, body = JsonArguments(), body.lstrip()
                yield Call(self._recipient)
            self._recipient = ""
        if self._recipient and end is None:  # nothing but spaces
            return False
        self._held = "" if end is None else self._held[end:]
        yield from self._speak(body)
        if end is None:
            return False
        mark = self._held[0]
        if mark in _ENDS:
            self._held = self._held[1:]
        self._end(mark)
        return True

    def _end(self, mark: str) -> None:
        """Expect a head, after `mark`."""
        self._recipient, self.thinking, self._head, self._fresh = "", False, True, True
        self._role, self._arguments = _ROLE if mark == _START else "", None

    def _speak(self, body: str) -> Iterator[Part]:
        arguments = self._arguments
        if arguments is None:
            yield from self._part(body)
            return
        if not arguments.whole:
            piece = arguments.push(body.translate(_SPELLED))
            self.called = arguments.whole
            if piece or arguments.whole:
                yield ArgumentText(piece, arguments.whole)
            body, self._gap = arguments.rest, None
        # Of the spaces behind the arguments, those between words stay.
        said = body.lstrip() if self._gap is None else self._gap + body
        words = said.rstrip()
        if words or self._gap is not None:
            self._gap = said[len(words) :]
        yield from self._part(words)

    def _part(self, text: str) -> Iterator[Part]:
        if not text:
            return
        text = text.translate(_SPELLED)  # a mark where none may be
        if self._fresh and self._spoken[self.thinking]:
            text = f"\n{text}"
        self._fresh, self._spoken[self.thinking] = False, True
        yield Thought(text) if self.thinking else text


def _find_first(text: str, marks: Iterable[str]) -> int | None:
    """The place of the first of `marks` in `text`."""
    return min((at for mark in marks if (at := text.find(mark)) >= 0), default=None)
