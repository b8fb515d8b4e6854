"""Finds thoughts in an answer: between marks before the answer, or on a channel."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from tangram.serve.calls import Call, CallReader, arguments_json, mark_overlap, read_call_json
from tangram.types import ThinkingFormat


@dataclass(frozen=True)
class Thought:
    """A thought of the model before its answer."""

    text: str


Part = str | Thought | Call


class Reader(Protocol):
    """Splits one completion into parts as its text arrives."""

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought, as far as is known."""

    @property
    def called(self) -> bool:
        """Whether there was a call."""

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""

    def finish(self) -> Iterator[Part]:
        """What was held back, once the completion has ended."""


class TextReader:
    """An answer of which all is text."""

    thinking, called = False, False

    def push(self, text: str) -> Iterator[Part]:
        """The text itself."""
        yield text

    def finish(self) -> Iterator[Part]:
        """Nothing is held back."""
        return iter(())


class ThoughtReader:
    """A thought between marks, then the rest, which a reader made by `rest` reads.

    Only the beginning of an answer can be a thought. Spaces around a thought belong to its marks.
    With `opened` the prompt has opened the thought; the mark may come again.
    """

    def __init__(
        self, form: ThinkingFormat, *, opened: bool, rest: Callable[[], CallReader] | None
    ) -> None:
        self._form, self._rest = form, None if rest is None else rest()
        self._held, self._begun, self._gap = "", False, False
        self.thinking = opened

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._rest is not None and self._rest.called

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
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

    def _answer(self) -> Iterator[str | Call]:
        if self._gap:
            self._held = self._held.lstrip()
            self._gap = not self._held
        held, self._held = self._held, ""
        yield from self._read_answer(held)

    def _read_answer(self, text: str) -> Iterator[str | Call]:
        if self._rest is not None:
            yield from self._rest.push(text)
        elif text:
            yield text


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# The beginning of a head, before any mark
_PLAIN_HEAD = re.compile(r"\s*[a-z]{0,9}\s*(to?(=\S*)?)?\s*")
_MOST_HEAD = 256
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MARKS = ("<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
_THOUGHTS = "analysis"


class ChannelReader:
    """Messages of GPT-OSS (Harmony): `<|channel|>`, its name, `<|message|>`, the text, `<|end|>`.

    The channel `analysis` is thought. A message to one of the functions `names` is a call.
    Everything else is text. Thoughts of several messages are joined by line breaks, and so are
    texts.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held, self._head, self._recipient = "", True, ""
        self._fresh, self._spoken = True, {True: False, False: False}
        self.thinking, self.called = False, False

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while not self._head or self._open():
            found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
            if not found:
                yield from self._certain()
                return
            at, mark = min(found)
            body, self._held = self._held[:at], self._held[at + len(mark) :]
            yield from self._close(body)

    def finish(self) -> Iterator[Part]:
        """What was held back. The head of a message without text is dropped."""
        held, self._held = self._held, ""
        if not self._head:
            yield from self._close(held)
        elif held and not any(mark in held for mark in _MARKS):
            yield held

    def _open(self) -> bool:
        """Whether the text of a message has begun."""
        head, message, text = self._held.partition(_MESSAGE)
        if message:
            channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
            self._recipient = "" if to is None else to[1]
            self.thinking = channel is not None and channel[1] == _THOUGHTS and to is None
            self._held, self._head, self._fresh = text, False, True
            return True
        marked = any(mark in head or mark_overlap(head, mark) for mark in _MARKS)
        if len(head) <= _MOST_HEAD and (marked or _PLAIN_HEAD.fullmatch(head)):
            return False
        # A model that does not follow its form writes text.
        self._recipient, self.thinking, self._head = "", False, False
        return True

    def _certain(self) -> Iterator[Part]:
        if not self._recipient:
            end = len(self._held) - max(mark_overlap(self._held, mark) for mark in _ENDS)
            text, self._held = self._held[:end], self._held[end:]
            yield from self._part(text)

    def _close(self, body: str) -> Iterator[Part]:
        known = self._recipient in self._names
        arguments = arguments_json(read_call_json(body)) if known else None
        if arguments is None:
            yield from self._part(body)
        else:
            self.called = True
            yield Call(self._recipient, arguments)
        self._recipient, self.thinking, self._head = "", False, True

    def _part(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._fresh and self._spoken[self.thinking]:
            text = f"\n{text}"
        self._fresh, self._spoken[self.thinking] = False, True
        yield Thought(text) if self.thinking else text
