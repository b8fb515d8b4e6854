"""Finds tool calls in an answer while it is written. Text that begins no known call stays text.

Transformers' parser of answers (`utils/chat_parsing`) fails on broken JSON and needs a mark at both
ends. Here a limit may cut an answer, and Llama's calls have no marks.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import Any

from tangram.engine.text.answer_text import spell
from tangram.engine.text.formats import loosen, split_shape
from tangram.serve.formats.arguments import (
    CallArguments,
    JsonArguments,
    mark_overlap,
    refuse_constant,
    write_json,
)
from tangram.serve.formats.literals import LiteralArguments, literal_head
from tangram.serve.formats.tagged import TaggedArguments, tagged_head
from tangram.types import CallStyle, Piece, ToolFormat

_SHORT_ID = 9  # letters and digits of Mistral's ids
_MOST_HEAD = 512  # characters of a call before its arguments
_BETWEEN = r"[\s,;\[\]]*"
_PLAIN = r'(?:"[^"\\]*"|[\w.+-]+)'  # a value beside the name and the arguments
_KEYS = re.compile(r'"(\w+)": "?\$([a-z]+)')
_HOLES = {
    "name": r"(?P<name>[\w.-]+?)",
    "index": r"(?P<index>\d*)",
    "callid": r"(?:\[CALL_ID\]\w*)?",
}


@dataclass(frozen=True)
class Call:
    """The beginning of a call of the function `name`, or of the `custom` tool."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    custom: bool = False


@dataclass(frozen=True)
class ArgumentText:
    """A piece of the last call's arguments, a JSON object. The `last` one ends the call.

    A call without one was cut by the end of the answer. Those of a `custom` tool are its input.
    """

    text: str
    last: bool
    custom: bool = False


CallPart = str | Call | ArgumentText


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


class CallReader:
    """Splits one completion into text and calls as its text arrives.

    `names` are the functions that may be called. `parameters` are their schemas, for forms that do
    not say whether a value is text. A call begins where its name is known and its arguments begin.
    """

    thinking = False

    def __init__(
        self, form: ToolFormat, names: Collection[str], parameters: Mapping[str, Any] | None = None
    ) -> None:
        self._form, self._names, self._parameters = form, names, parameters or {}
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held, self._inside, self._plain = "", False, False
        self._gap = ""  # the spaces before the mark that has opened a block of calls
        self._arguments: CallArguments | None = None
        self._count, self._called_before, self.called = 0, 0, False
        self._texts, self._read, self._searched = QuotedTexts(), 0, 0

    def push(self, pieces: Iterable[Piece]) -> Iterator[CallPart]:
        """The text and calls that are certain now."""
        self._held += spell(pieces)
        going = True
        while going:
            if self._arguments is not None:
                going = yield from self._read_arguments(self._arguments)
            else:
                going = yield from (self._read_block() if self._inside else self._read_text())

    def finish(self) -> Iterator[CallPart]:
        """What was held back, once the completion has ended."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            return
        if self._inside and not self._end:
            yield from self._close(held, "")
        elif self._inside and self._count == self._called_before:
            yield f"{self._gap}{self._begin}{held}"
        elif self._inside:
            rest = held[_match_end(_between(self._form), held) :]
            if not _closing(self._form).startswith("".join(rest.split())):
                yield rest
        elif held.strip() or not self.called:
            yield held

    def _read_text(self) -> Generator[CallPart, None, bool]:
        """Read text up to the mark of a call. Returns whether there may be more to read."""
        if not self._begin and not self._plain:
            first = self._form.brackets or self._form.call
            self._plain = self._held.lstrip()[:1] not in ("", first[0])
            self._inside = not self._plain and bool(self._held.strip())
            if not self._plain:
                return self._inside
        found = -1 if self._plain else self._held.find(self._begin)
        if found >= 0:
            yield from self._open(found)
            return True
        kept = 0 if self._plain else self._measure_undecided()
        end = len(self._held) - kept
        text, self._held = self._held[:end], self._held[end:]
        if text:
            yield text
        return False

    def _open(self, found: int) -> Iterator[str]:
        """Open a block of calls; spaces before it belong to it."""
        spoken, self._held = self._held[:found], self._held[found + len(self._begin) :]
        before = spoken.rstrip()
        self._gap, self._inside, self._called_before = spoken[len(before) :], True, self._count
        self._look_anew()
        if before:
            yield before

    def _look_anew(self) -> None:
        self._texts, self._read, self._searched = QuotedTexts(_quotes(self._form)), 0, 0

    def _read_block(self) -> Generator[CallPart, None, bool]:
        """Read the head of a call, or the end of the block, as `_read_text` does."""
        if head := self._find_head():
            name, written, end = head
            self._held = self._held[end:]
            self._arguments = _arguments_of(name, self._form, self._parameters)
            yield self._begin_call(name, written)
            return True
        mark = self._end or self._begin
        while mark and (found := self._held.find(mark, self._searched)) >= 0:
            self._texts.read(self._held[self._read : found])
            self._read, self._searched = found, found + len(mark)
            if not self._texts.open:
                inside, self._held = self._held[:found], self._held[found + len(mark) :]
                yield from self._close(inside, self._end)
                return True
        self._searched = max(self._searched, len(self._held) - len(mark))
        return False

    def _find_head(self) -> tuple[str, Mapping[str, str], int] | None:
        """Name, what else is said and the end of the head that begins here, of a known function."""
        if self._searched >= _MOST_HEAD:  # all of it was looked at
            return None
        found = _head(self._form).match(self._held, 0, _MOST_HEAD)
        if found is None:
            return None
        written = found.groupdict()
        if "object" in written:
            name, _ = _read_names(_read_json(f"{written.pop('object')}{{}}}}"), self._form)
        else:
            name = written.pop("name").strip()
        known = isinstance(name, str) and name in self._names
        return (name, written, found.end()) if known else None

    def _read_arguments(self, arguments: CallArguments) -> Generator[CallPart, None, bool]:
        text, self._held = self._held, ""
        piece = arguments.push(text)
        if piece or arguments.whole:
            yield ArgumentText(piece, arguments.whole)
        self.called = arguments.whole
        if arguments.whole or arguments.broken:
            self._held, self._arguments = arguments.rest, None
            self._look_anew()
        return self._arguments is None

    def _close(self, inside: str, end: str) -> Iterator[CallPart]:
        """Close a block that ends in `inside`; one without an end mark ends where one begins."""
        self._inside = bool(self._begin) and not self._end
        rest, begun = inside[_match_end(_between(self._form), inside) :], self._called_before
        whole = self._read_whole(rest) if self._form.style is CallStyle.OBJECT else []
        for name, arguments in whole:
            yield self._begin_call(name, {})
            yield ArgumentText(arguments, last=True)
            self.called = True
        if not whole and begun == self._count:
            yield f"{self._gap}{self._begin}{inside}{end}"
        elif not whole and rest:
            yield rest
        self._gap, self._called_before = "", self._count
        self._look_anew()

    def _measure_undecided(self) -> int:
        """How many last characters may belong to a call: spaces, and the beginning of a mark."""
        text = self._held
        before = text[: len(text) - mark_overlap(text, self._begin)]
        return len(text) - len(before.rstrip())

    def _read_whole(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments of calls that write the name last; none if any is something else."""
        calls = []
        for value in _objects(text):
            name, arguments = _read_names(value, self._form)
            written = write_json(arguments) if isinstance(arguments, dict) else None
            if written is None or not isinstance(name, str) or name not in self._names:
                return []
            calls.append((name, written))
        return calls

    def _begin_call(self, name: str, written: Mapping[str, str]) -> Call:
        self._count += 1
        if not self._form.ids:
            return Call(name)
        said = {"index": str(self._count - 1), **{k: v for k, v in written.items() if v}}
        short = uuid.uuid4().hex[:_SHORT_ID]
        return Call(name, Template(self._form.ids).substitute(said, name=name, short=short))


def _quotes(form: ToolFormat) -> tuple[str, ...]:
    """What texts stand between, in which a mark ends no call; values between tags have none."""
    if form.style is CallStyle.TAGGED:
        return ()
    return ("'", '"') if form.style is CallStyle.PYTHON else (form.quote or '"',)


def _arguments_of(name: str, form: ToolFormat, schemas: Mapping[str, Any]) -> CallArguments:
    if form.style is CallStyle.TAGGED:
        return TaggedArguments(form, schemas.get(name, {}))
    if form.style in (CallStyle.PYTHON, CallStyle.QUOTED):
        return LiteralArguments.of(form)
    return JsonArguments(form.end.strip() or form.begin.strip())


@cache
def _head(form: ToolFormat) -> re.Pattern[str]:
    """What finds a call up to its arguments, with groups for what it says."""
    if form.style is CallStyle.TAGGED:
        found = tagged_head(form)
    elif form.style in (CallStyle.PYTHON, CallStyle.QUOTED):
        found = literal_head(form)
    elif form.style is CallStyle.OBJECT:
        fields = rf'(?:\s*"[^"\\]*"\s*:\s*{_PLAIN}\s*,)*'
        found = rf'(?P<object>\{{{fields}\s*"(?:{"|".join(_list_keys(form))})"\s*:\s*)(?=\{{)'
    else:
        *head, _, _ = split_shape(form.call)
        parts = (_HOLES[part] if at % 2 else loosen(part) for at, part in enumerate(head))
        found = rf"{''.join(parts)}\s*(?=\{{)"
    return re.compile(_between(form).pattern + found)


@cache
def _between(form: ToolFormat) -> re.Pattern[str]:
    """What may stand between the arguments of a call and the next call or the end."""
    tail = ""
    if form.style is CallStyle.OBJECT:
        tail = rf'(?:(?:\s*,\s*"\w+"\s*:\s*{_PLAIN})*\s*\}})?'
    elif form.style is CallStyle.NAMED:
        tail = rf"(?:\s*{loosen(split_shape(form.call)[-1])})?"
    return re.compile(tail + _BETWEEN)


@cache
def _closing(form: ToolFormat) -> str:
    """What stands after the arguments of the last call, without spaces."""
    tail = split_shape(form.call)[-1] if form.style in (CallStyle.OBJECT, CallStyle.NAMED) else ""
    return "".join(f"{tail}{(form.brackets or ('', ''))[1]}{form.end}".split())


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return 0 if found is None else found.end()


def _read_json(text: str) -> Any:
    """The JSON value in `text`; None if it is not JSON."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def _list_keys(form: ToolFormat) -> list[str]:
    """The names of the arguments; models may write another than their own."""
    own = [key for key, hole in _KEYS.findall(form.call) if hole == "arguments"]
    return list(dict.fromkeys([*own, "arguments", "parameters"]))


def _read_names(call: Any, form: ToolFormat) -> tuple[Any, Any]:
    """Name and arguments of a call."""
    if not isinstance(call, dict):
        return None, None
    own = {hole: key for key, hole in _KEYS.findall(form.call)}
    given = next((call[key] for key in _list_keys(form) if key in call), None)
    return call.get(own["name"]), given


def _objects(text: str) -> Iterator[Any]:
    """JSON values with separators or brackets between them; None for a malformed value."""
    gap = re.compile(_BETWEEN)
    decoder, at = json.JSONDecoder(parse_constant=refuse_constant), _match_end(gap, text)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        found = gap.match(text, at)
        at = at if found is None else found.end()
