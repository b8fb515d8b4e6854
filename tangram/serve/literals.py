"""Calls with literals. Python writes them so, or texts are between marks.

look(city="Rome", days=[1, 2])
call:look{city:<|"|>Rome<|"|>,days:[1,2]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from tangram.engine.text.formats import split_shape
from tangram.serve.json_schema import json_rule
from tangram.serve.json_text import refuse_constant
from tangram.serve.schema_parts import (
    DEFINITIONS,
    NOTES,
    blame,
    list_values,
    split_schema,
    types_of,
)
from tangram.types import CallStyle, ToolFormat

_MOST_LEVELS = 64
_WORDS = {"True": True, "False": False, "None": None}
_WORDS |= {"true": True, "false": False, "null": None}
_GAP, _WORD = re.compile(r"\s*"), re.compile(r"[^\s,:=\[\]{}()\"'<]+")
_PYTHON_TEXT = re.compile(r"'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_NO_MARKS = ToolFormat("", "")


class _MalformedError(ValueError):
    """What is no call in this form."""


def read_literal_calls(text: str, form: ToolFormat) -> Iterator[tuple[Any, Any]]:
    """Name and arguments of each call in `text`; None for a malformed call, which is the last."""
    reader, at = _Reader(text, form), 0
    while at < len(text.rstrip(", \n")):
        try:
            name, arguments, at = reader.call(at)
        except _MalformedError:
            yield None, None
            return
        yield name, arguments


def read_python_value(text: str) -> Any:
    """The value that `text` writes as Python does. Raises `ValueError` if it is no such value."""
    return _Reader(text, _NO_MARKS).whole()


@cache
def _edges(form: ToolFormat) -> tuple[re.Pattern[str], str, str]:
    """What begins a call, what ends it, and what stands between name and value."""
    before, _, opening, _, closing = split_shape(form.call)
    head = rf"[\s,]*{re.escape(before)}([\w.-]+)\s*{re.escape(opening)}"
    return re.compile(head), closing, split_shape(form.argument)[2]


class _Reader:
    """Reads calls in `text`, each part at its place. Raises `_MalformedError`."""

    def __init__(self, text: str, form: ToolFormat) -> None:
        self._text, self._form = text, form
        quote = re.escape(form.quote)
        marked = re.compile(rf"{quote}(.*?){quote}()", re.DOTALL)
        self._quoted = marked if form.quote else _PYTHON_TEXT

    def call(self, at: int) -> tuple[str, dict[str, Any], int]:
        """The call at `at`: its name, its arguments, where it ends."""
        head, closing, equals = _edges(self._form)
        found = head.match(self._text, at)
        if found is None:
            raise _MalformedError
        arguments, at = self._pairs(found.end(), equals, closing, 1)
        return found[1], arguments, at

    def whole(self) -> Any:
        """The value that is all of the text."""
        value, at = self._value(0, 1)
        if self._after_gap(at) < len(self._text):
            raise _MalformedError
        return value

    def _pairs(self, at: int, equals: str, closing: str, level: int) -> tuple[dict[str, Any], int]:
        pairs: dict[str, Any] = {}
        while not self._text.startswith(closing, at := self._after_gap(at)):
            key, at = self._key(at)
            at = self._expect(equals, at)
            pairs[key], at = self._value(at, level)
            at = self._separate(at, closing)
        return pairs, at + len(closing)

    def _value(self, at: int, level: int) -> tuple[Any, int]:
        if level > _MOST_LEVELS:
            raise _MalformedError
        at = self._after_gap(at)
        opening = self._text[at : at + 1]
        if opening == "{":
            return self._pairs(at + 1, ":", "}", level + 1)
        if opening == "[":
            items, at = [], at + 1
            while not self._text.startswith("]", at := self._after_gap(at)):
                item, at = self._value(at, level + 1)
                items.append(item)
                at = self._separate(at, "]")
            return items, at + 1
        if found := self._quoted.match(self._text, at):
            return self._unquote(found), found.end()
        return self._plain(at)

    def _key(self, at: int) -> tuple[str, int]:
        found = self._quoted.match(self._text, at)
        if found is not None:
            return self._unquote(found), found.end()
        found = _WORD.match(self._text, at)
        if found is None:
            raise _MalformedError
        return found[0], found.end()

    def _plain(self, at: int) -> tuple[Any, int]:
        found = _WORD.match(self._text, at)
        if found is None:
            raise _MalformedError
        word = found[0]
        if word in _WORDS:
            return _WORDS[word], found.end()
        try:
            return json.loads(word, parse_constant=refuse_constant), found.end()
        except ValueError as error:
            raise _MalformedError from error

    def _unquote(self, found: re.Match[str]) -> str:
        text = found[1] or found[2] or ""
        return text if self._form.quote else _ESCAPE.sub(_unescape, text)

    def _expect(self, mark: str, at: int) -> int:
        at = self._after_gap(at)
        if not self._text.startswith(mark, at):
            raise _MalformedError
        return at + len(mark)

    def _separate(self, at: int, closing: str) -> int:
        """The place after the comma, or of `closing`."""
        at = self._after_gap(at)
        return at if self._text.startswith(closing, at) else self._expect(",", at)

    def _after_gap(self, at: int) -> int:
        found = _GAP.match(self._text, at)
        return at if found is None else found.end()


def _unescape(found: re.Match[str]) -> str:
    code, other = found[1] or found[2], found[3]
    if code:
        return chr(int(code, 16))
    return _ESCAPED.get(other, other if other in "\\'\"/" else found[0])


def make_literal_rules(
    rule: str,
    name: str,
    schema: Mapping[str, Any],
    field: str,
    form: ToolFormat,
    write: Callable[[str], str],
    *,
    to_the_letter: bool,
) -> Iterator[str]:
    """The grammar rules of a call of `name`; the last, `rule`, is the whole call.

    `write` makes a part of a grammar of a text that has marks. `to_the_letter` is as in
    `make_tagged_rules`.
    """
    writer = _RuleWriter(schema, form, write, to_the_letter=to_the_letter)
    before, _, opening, _, closing = split_shape(form.call)
    equals = split_shape(form.argument)[2]
    free = "properties" not in schema and schema.get("additionalProperties") is not False
    pairs = "any?" if free else writer.pairs(rule, schema, field, equals)
    yield from writer.rules
    yield f"{rule}: {write(f'{before}{name}{opening}')} {pairs} {write(closing)}"


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
