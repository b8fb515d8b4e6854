"""Calls with literals. Python writes them so, or texts are between marks.

look(city="Rome", days=[1, 2])
call:look{city:<|"|>Rome<|"|>,days:[1,2]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tangram.engine.text.formats import split_shape
from tangram.serve.bodies.json_schema import json_rule
from tangram.serve.bodies.schema_parts import (
    DEFINITIONS,
    NOTES,
    CallRule,
    blame,
    list_values,
    split_schema,
    types_of,
)
from tangram.serve.formats.arguments import (
    CallArguments,
    escape_text,
    mark_overlap,
    refuse_constant,
)
from tangram.types import CallStyle, ToolFormat

_MOST_LEVELS = 64
_MOST_WORD = 1024
_WORDS = {"True": "true", "False": "false", "None": "null"}
_GAP, _WORD = re.compile(r"\s*"), re.compile(r"[^\s,:=\[\]{}()\"'<]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def literal_head(form: ToolFormat) -> str:
    """A pattern of a call up to its arguments, with a group `name`."""
    before, _, opening, *_ = split_shape(form.call)
    return rf"{re.escape(before)}(?P<name>[\w.-]+)\s*{re.escape(opening)}"


def read_python_value(text: str) -> Any:
    """The value that `text` writes as Python does. Raises `ValueError` if it is no such value."""
    reader = LiteralArguments("]")
    written = reader.push(f"{text}]")
    values = json.loads(written) if reader.whole and not reader.rest else []
    if len(values) != 1 or text.rstrip().endswith(","):
        raise ValueError("not one value")
    return values[0]


class _Want(Enum):
    """What comes next; after `ITEM` and `COMMA` also the end of what is open."""

    ITEM, KEY, EQUALS, VALUE, COMMA = range(5)


@dataclass
class _Level:
    """What is open: pairs with `equals` between name and value, or a list."""

    closing: str
    equals: str = ""
    filled: bool = False


class LiteralArguments(CallArguments):
    """Pairs up to `closing`, with `equals` between name and value; without `equals` a list.

    Texts are between `quote`, or as Python has them.
    """

    def __init__(self, closing: str, equals: str = "", quote: str = "") -> None:
        super().__init__()
        self._quotes, self._levels = (quote,) if quote else ("'", '"'), [_Level(closing, equals)]
        self._escapes = not quote
        self._held, self._at = "", 0
        self._want, self._open = _Want.ITEM, ""  # the quote of the text that has begun
        self._said, self._high = ["{" if equals else "["], ""  # the first half of a surrogate pair

    @classmethod
    def of(cls, form: ToolFormat) -> LiteralArguments:
        """What reads those of a call in `form`."""
        return cls(split_shape(form.call)[-1], split_shape(form.argument)[2], form.quote)

    def push(self, text: str) -> str:
        """As for all arguments."""
        self._held += text
        while not (self.whole or self.broken) and self._step():
            pass
        self._held, self._at = self._held[self._at :], 0
        said, self._said = "".join(self._said), []
        return said

    def _step(self) -> bool:
        """Read on. Returns whether there may be more to read."""
        if self._open:
            return self._read_text()
        found = _GAP.match(self._held, self._at)
        self._at = self._at if found is None else found.end()
        following, level = self._held[self._at : self._at + 1], self._levels[-1]
        match self._want:
            case _ if not following:
                return False
            case _Want.ITEM | _Want.COMMA if following == level.closing:
                self._close()
            case _Want.ITEM:
                self._go_on(
                    ", " if level.filled else "", _Want.KEY if level.equals else _Want.VALUE
                )
                level.filled = True
            case _Want.VALUE if following in "{[" and len(self._levels) < _MOST_LEVELS:
                self._levels.append(_Level("}", ":") if following == "{" else _Level("]"))
                self._go_on(following, _Want.ITEM, self._at + 1)
            case _Want.KEY | _Want.VALUE:
                return self._begin_text() or self._read_word()
            case _Want.EQUALS if following == level.equals:
                self._go_on(": ", _Want.VALUE, self._at + 1)
            case _Want.COMMA if following == ",":
                self._go_on("", _Want.ITEM, self._at + 1)
            case _:
                self._stop(self._held[self._at :], whole=False)
        return True

    def _go_on(self, said: str, want: _Want, at: int | None = None) -> None:
        self._said.append(said)
        self._want, self._at = want, self._at if at is None else at

    def _close(self) -> None:
        said = "}" if self._levels.pop().equals else "]"
        self._go_on(said, _Want.COMMA, self._at + 1)
        if not self._levels:
            self._stop(self._held[self._at :], whole=True)

    @property
    def _after(self) -> _Want:
        """What is wanted after the text or word that is wanted now."""
        return _Want.EQUALS if self._want is _Want.KEY else _Want.COMMA

    def _begin_text(self) -> bool:
        for quote in self._quotes:
            if self._held.startswith(quote, self._at):
                self._open = quote
                self._go_on('"', self._want, self._at + len(quote))
                return True
        return False

    def _read_word(self) -> bool:
        """Read a word that is whole: a name, a number, true, false or null."""
        found = _WORD.match(self._held, self._at)
        if found is None and self._quotes[0].startswith(self._held[self._at :]):
            return False
        if found is not None and found.end() == len(self._held) and len(found[0]) < _MOST_WORD:
            return False
        word = "" if found is None else found[0]
        try:
            said = _WORDS.get(word, word)
            if self._want is _Want.KEY and word:
                said = json.dumps(word, ensure_ascii=False)
            else:
                json.loads(said, parse_constant=refuse_constant)
        except ValueError:
            self._stop(self._held[self._at :], whole=False)
        else:
            self._go_on(said, self._after, self._at + len(word))
        return True

    def _read_text(self) -> bool:
        """Read the text that is open, as far as it has come."""
        held, marks = self._held, re.escape(self._open) + (r"|\\" if self._escapes else "")
        stop = re.compile(marks).search(held, self._at)
        end = len(held) if stop is None else stop.start()
        if stop is None:
            end -= mark_overlap(held[self._at :], self._open)
        self._say(held[self._at : end])
        self._at = end
        if stop is None:
            return False
        if stop[0] == self._open:
            self._say("", last=True)
            self._open = ""
            self._go_on('"', self._after, stop.end())
            return True
        escape = _ESCAPE.match(held, end)
        if escape is None or _HALF_ESCAPE.fullmatch(held, end):
            return False
        self._say(_unescape(escape))
        self._at = escape.end()
        return True

    def _say(self, text: str, *, last: bool = False) -> None:
        """Write a part of a text. UTF-8 cannot spell half a surrogate pair."""
        text = self._high + text
        self._high = text[-1:] if not last and "\ud800" <= text[-1:] < "\udc00" else ""
        whole = text[: len(text) - len(self._high)].encode("utf-16-le", "surrogatepass")
        self._said.append(escape_text(whole.decode("utf-16-le", "replace")))


def _unescape(found: re.Match[str]) -> str:
    code, other = found[1] or found[2], found[3]
    if code:
        return chr(int(code, 16))
    return _ESCAPED.get(other, other if other in "\\'\"/" else found[0])


def make_literal_rules(
    rule: CallRule, form: ToolFormat, write: Callable[[str], str]
) -> Iterator[str]:
    """The grammar rules of a call; the last, `rule`, is the whole call. See `make_tagged_rules`."""
    schema = rule.schema
    writer = _RuleWriter(schema, form, write, to_the_letter=rule.to_the_letter)
    before, _, opening, _, closing = split_shape(form.call)
    equals = split_shape(form.argument)[2]
    free = "properties" not in schema and schema.get("additionalProperties") is not False
    pairs = "any?" if free else writer.pairs(rule.name, schema, rule.field, equals)
    yield from writer.rules
    yield f"{rule.name}: {write(f'{before}{rule.function}{opening}')} {pairs} {write(closing)}"


def list_literal_rules(form: ToolFormat, write: Callable[[str], str], text: list[str]) -> list[str]:
    """The rules that calls with marks around texts share; `text` is that of `literal_text`."""
    if form.style is CallStyle.PYTHON:
        return [
            'any: any_pair (", " any_pair)*',
            f'any_pair: /[A-Za-z_][A-Za-z0-9_]*/ "=" {json_rule({})}',
        ]
    scalar = json_rule({"type": ["number", "boolean", "null"]})
    return [
        'any: literal_pair ("," literal_pair)*',
        "LITERAL: /(.|\\n)*/",
        *text,
        f"quoted_text: {write(form.quote)} literal_text",
        f"literal: quoted_text | {scalar} | literal_list | literal_object",
        'literal_list: "[" (literal ("," literal)*)? "]"',
        'literal_object: "{" (literal_pair ("," literal_pair)*)? "}"',
        'literal_pair: /[A-Za-z0-9_-]+/ ":" literal',
    ]


class _RuleWriter:
    """Makes `rules` for the values that `root` and its parts allow."""

    def __init__(
        self,
        root: Mapping[str, Any],
        form: ToolFormat,
        write: Callable[[str], str],
        *,
        to_the_letter: bool,
    ) -> None:
        self._root, self._form, self._write = root, form, write
        self._to_the_letter, self.rules = to_the_letter, list[str]()

    def pairs(self, rule: str, schema: Mapping[str, Any], place: str, equals: str) -> str:
        """A part of a grammar: the properties of `schema` in their order, those required at least.

        `{rule}_f3` is all from the third on, `{rule}_c3` the same after a comma.
        """
        comma = json.dumps(", " if self._form.style is CallStyle.PYTHON else ",")
        required, properties = schema.get("required", ()), schema.get("properties", {})
        first, after, optional = "", "", True
        for at, (key, value) in reversed(list(enumerate(properties.items()))):
            where = f"{place}.properties.{key}"
            if not _WORD.fullmatch(key):
                raise blame("this model writes only plain words as names: rename it", where)
            value_of = self._value(f"{rule}_{at}", value, where)
            self.rules.append(f"{rule}_{at}: {json.dumps(key + equals)} {value_of}")
            own, rest = f"{rule}_{at}", f" {after}" if after else ""
            if key in required:
                begun, first, optional = f"{comma} {own}{rest}", f"{own}{rest}", False
            else:
                begun = f"({comma} {own})?{rest}"
                others = f" | {first}" if first else ""
                first = f"{own}{rest}{others}"
            self.rules += [f"{rule}_c{at}: {begun}", f"{rule}_f{at}: {first}"]
            first, after = f"{rule}_f{at}", f"{rule}_c{at}"
        return f"({first})?" if first and optional else first

    def _value(self, rule: str, schema: Any, place: str) -> str:
        shared = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        if self._form.style is CallStyle.PYTHON:
            return json_rule(shared | (schema if isinstance(schema, dict) else {}))
        parts = split_schema(schema, self._root)
        inside = not _refers(schema)  # a definition may hold itself
        found = [
            self._part(f"{rule}_{at}", part, place, shared, inside=inside)
            for at, part in enumerate(parts)
        ]
        return f"({' | '.join(dict.fromkeys(found))})"

    def _part(
        self, rule: str, part: dict[str, Any], place: str, shared: dict[str, Any], *, inside: bool
    ) -> str:
        kinds, said = types_of(part), sorted(part.keys() - NOTES)
        if "enum" in part or "const" in part:
            values = list_values(part)
            if all(not isinstance(value, (list, dict)) for value in values):
                return " | ".join(map(self._spell, values))
        if kinds == {"object"} and inside and part.get("properties"):
            return f'"{{" {self.pairs(rule, part, place, ":")} "}}"'
        if kinds == {"array"} and inside and "items" in part:
            item = self._value(rule, part["items"], f"{place}.items")
            self.rules.append(f"{rule}: {item}")
            said = sorted(set(said) - {"items"})
            self._allow(said, place)
            return f'"[" ({rule} ("," {rule})*)? "]"'
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return json_rule(shared | part)
        self._allow(said, place)
        return "quoted_text" if kinds == {"string"} else "literal"

    def _allow(self, said: list[str], place: str) -> None:
        if said and self._to_the_letter:
            message = f"this model's form of calls cannot bound values by {said[0]!r}: leave it out"
            raise blame(message, f"{place}.{said[0]}")

    def _spell(self, value: Any) -> str:
        quote = self._write(self._form.quote)
        if not isinstance(value, str):
            return json.dumps(json.dumps(value))
        return f"({quote} {json.dumps(value)} {quote})" if value else f"({quote} {quote})"


def _refers(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    either = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    return "$ref" in schema or any(map(_refers, either))
