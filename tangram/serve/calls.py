"""Finds tool calls in an answer while it is written. Anything that is no valid call stays text.

Transformers' parser of answers (`utils/chat_parsing`) fails on broken JSON and needs a mark at both
ends. Here a limit may cut an answer, and Llama's calls have no marks.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import Any

from tangram.engine.text.answer_text import spell
from tangram.engine.text.formats import loosen, split_shape
from tangram.serve.json_text import QuotedTexts, refuse_constant
from tangram.serve.literals import read_literal_calls
from tangram.serve.tagged import is_unfinished, read_tagged_calls
from tangram.types import CallStyle, Piece, ToolFormat

_SHORT_ID = 9  # letters and digits of Mistral's ids
_BETWEEN = re.compile(r"[\s;]*")
_KEYS = re.compile(r'"(\w+)": "?\$([a-z]+)')
_HOLES = {
    "name": r"(?P<name>[\w.-]+?)",
    "index": r"(?P<index>\d*)",
    "callid": r"(?:\[CALL_ID\]\w*)?",
}


@dataclass(frozen=True)
class Call:
    """A call of the function `name`; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def json(self) -> dict[str, Any]:
        """The call as it is in an answer."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    """Splits one completion into text and calls as its text arrives.

    `names` are the functions that may be called. `parameters` are their schemas, for forms that do
    not say whether a value is text.
    """

    thinking = False

    def __init__(
        self, form: ToolFormat, names: Collection[str], parameters: Mapping[str, Any] | None = None
    ) -> None:
        self._form, self._names, self._parameters = form, names, parameters or {}
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held, self._inside, self._searched, self._plain = "", False, 0, False
        self._gap = ""  # the spaces before the mark that has opened a call
        self._texts, self._read = _texts(form), 0  # read up to here
        self._count, self.called = 0, False

    def push(self, pieces: Iterable[Piece]) -> Iterator[str | Call]:
        """The text and calls that are certain now."""
        self._held += spell(pieces)
        if not self._begin:
            yield from self._whole_answer()
            return
        while (found := self._held.find(self._mark, self._searched)) >= 0:
            if self._inside and self._is_argument(found):
                self._searched = found + len(self._mark)
            else:
                yield from self._close(found) if self._inside else self._open(found)
        self._searched = max(0, len(self._held) - max(len(self._begin), len(self._end)))
        if not self._inside:
            yield from self._free(self._measure_undecided())

    def finish(self) -> Iterator[str | Call]:
        """What was held back, once the completion has ended."""
        held, self._held = self._held, ""
        ends = not self._begin or (self._inside and not self._end)
        calls = self._calls(held) if ends and not self._plain else []
        if calls:
            yield from calls
        elif held.strip() or not self.called:
            yield f"{self._gap}{self._begin}{held}" if self._inside else held

    @property
    def _mark(self) -> str:
        """The mark to look for next."""
        return self._end or self._begin if self._inside else self._begin

    def _whole_answer(self) -> Iterator[str]:
        first = self._form.brackets or self._form.call
        self._plain = self._plain or self._held.lstrip()[:1] not in ("", first[0])
        if self._plain:
            yield from self._free(0)

    def _open(self, found: int) -> Iterator[str]:
        """Open a call; spaces before it belong to it."""
        spoken, self._held = self._held[:found], self._held[found + len(self._begin) :]
        before = spoken.rstrip()
        self._gap = spoken[len(before) :]
        self._inside, self._searched = True, 0
        self._texts, self._read = _texts(self._form), 0
        if before:
            yield before

    def _close(self, found: int) -> Iterator[str | Call]:
        """Close a call; one without an end mark ends where the next begins."""
        inside, self._held = self._held[:found], self._held[found + len(self._mark) :]
        self._inside, self._searched = not self._end, 0
        self._texts, self._read = _texts(self._form), 0
        if calls := self._calls(inside):
            yield from calls
        else:
            yield f"{self._gap}{self._begin}{inside}{self._end}"
        self._gap = ""

    def _is_argument(self, found: int) -> bool:
        """Whether the mark at `found` is what an argument says, not the end of the call."""
        if self._form.style is CallStyle.TAGGED:
            return is_unfinished(self._held[:found], self._form)
        self._texts.read(self._held[self._read : found])
        self._read = found
        return self._texts.open

    def _free(self, kept: int) -> Iterator[str]:
        end = len(self._held) - kept
        text, self._held = self._held[:end], self._held[end:]
        self._searched = 0
        if text:
            yield text

    def _measure_undecided(self) -> int:
        """How many last characters may belong to a call: spaces, and the beginning of a mark."""
        text = self._held
        before = text[: len(text) - mark_overlap(text, self._begin)]
        return len(text) - len(before.rstrip())

    def _calls(self, text: str) -> list[Call]:
        """The calls in `text`; none if any of it is something else."""
        written = list(_read_calls(text, self._form, self._parameters))
        calls = [self._call(*each) for each in written]
        proper = [call for call in calls if call is not None]
        if len(proper) != len(calls):
            return []
        self.called = self.called or bool(proper)
        return proper

    def _call(self, name: Any, arguments: Any, written: Mapping[str, str]) -> Call | None:
        if not isinstance(name, str) or name not in self._names:
            return None
        text = arguments_json(arguments)
        if text is None:
            return None
        if not self._form.ids:
            return Call(name, text)
        self._count += 1
        said = {"index": str(self._count - 1), **{k: v for k, v in written.items() if v}}
        short = uuid.uuid4().hex[:_SHORT_ID]
        return Call(name, text, Template(self._form.ids).substitute(said, name=name, short=short))


def _texts(form: ToolFormat) -> QuotedTexts:
    """What tells whether a mark is inside a text of an argument."""
    if form.style is CallStyle.PYTHON:
        return QuotedTexts(("'", '"'))
    return QuotedTexts((form.quote or '"',))


def mark_overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark` and is shorter than it."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)


def arguments_json(arguments: Any) -> str | None:
    """A call's arguments as the text of a JSON object; None if they are no object."""
    if not isinstance(arguments, dict):
        return None
    try:
        # JSON has no infinity, which 1e999 is read as, and UTF-8 cannot spell half a surrogate
        # pair.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written


def read_call_json(text: str) -> Any:
    """The JSON value in `text`; None if it is not JSON."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def _read_calls(
    text: str, form: ToolFormat, schemas: Mapping[str, Any]
) -> Iterator[tuple[Any, Any, Mapping[str, str]]]:
    """Name, arguments and what else was said of each call in `text`; None for a malformed call."""
    if form.style is CallStyle.NAMED:
        yield from _read_named(text, form)
    elif form.style is CallStyle.TAGGED:
        yield from ((*call, {}) for call in read_tagged_calls(text, form, schemas))
    elif form.style is not CallStyle.OBJECT:
        inside = _unwrap(text.strip(), form)
        yield from ((*call, {}) for call in read_literal_calls(inside, form))
    elif form.begin:
        value = read_call_json(text)  # a call may come without the list around it
        listed = value if form.brackets and isinstance(value, list) else [value]
        yield from ((*_read_names(call, form), {}) for call in listed)
    else:
        yield from ((*_read_names(call, form), {}) for call in _objects(text))


def _unwrap(text: str, form: ToolFormat) -> str:
    """What stands between brackets; the text itself, which is no call then, without them."""
    opening, closing = (bracket.strip() for bracket in form.brackets or ("", ""))
    whole = text.startswith(opening) and text.endswith(closing)
    return text[len(opening) : len(text) - len(closing)] if whole else text


def _read_named(text: str, form: ToolFormat) -> Iterator[tuple[Any, Any, Mapping[str, str]]]:
    (head, tail), at = _named_patterns(form), 0
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    while at < len(text.rstrip()):
        found = head.match(text, at)
        try:
            arguments, at = decoder.raw_decode(text, found.end()) if found else (None, at)
        except (ValueError, RecursionError):
            found = None
        closed = tail.match(text, at)
        if found is None or closed is None:
            yield None, None, {}
            return
        at = closed.end()
        yield found["name"], arguments, found.groupdict()


@cache
def _named_patterns(form: ToolFormat) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds a call up to its arguments, and its end."""
    *head, _, tail = split_shape(form.call)
    found = "".join(_HOLES[part] if at % 2 else loosen(part) for at, part in enumerate(head))
    return re.compile(rf"\s*{found}\s*"), re.compile(rf"\s*{loosen(tail)}\s*")


def _read_names(call: Any, form: ToolFormat) -> tuple[Any, Any]:
    """Name and arguments of a call; models may write another name for arguments than their own."""
    if not isinstance(call, dict):
        return None, None
    own = {hole: key for key, hole in _KEYS.findall(form.call)}
    names = (own["arguments"], "arguments", "parameters")
    return call.get(own["name"]), next((call[name] for name in names if name in call), None)


def _objects(text: str) -> Iterator[Any]:
    """JSON values separated by semicolons or spaces; None for a malformed value."""
    decoder, at = json.JSONDecoder(parse_constant=refuse_constant), _end_of_gap(text, 0)
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        at = _end_of_gap(text, end)


def _end_of_gap(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()
