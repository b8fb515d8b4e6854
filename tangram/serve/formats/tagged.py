"""Calls with tags. The function has one, in it each argument, values bare.

    <function=look>
    <parameter=city>
    Rome
    </parameter>
    </function>

Text is not quoted, so only the function's schema says whether `3` is a number or a text, unless the
tag says it (DeepSeek V3.2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from tangram.engine.text.formats import loosen, split_argument, split_shape
from tangram.serve.bodies.json_schema import json_rule
from tangram.serve.bodies.schema_parts import (
    DEFINITIONS,
    KINDS,
    NOTES,
    CallRule,
    blame,
    follow_reference,
    list_values,
    split_schema,
    types_of,
)
from tangram.serve.formats.arguments import (
    CallArguments,
    escape_text,
    mark_overlap,
    refuse_constant,
    write_json,
)
from tangram.serve.formats.literals import read_python_value
from tangram.types import ToolFormat

_NAMES = re.compile(r"[^<>\n]+")
_MOST_TAGS = 512  # characters in which a tag and what follows it must be found
# How values begin that are no texts without quotes.
_BEGINNINGS = {"null": "nN", "boolean": "tfTF", "array": "[", "object": "{"}
_BEGINNINGS |= dict.fromkeys(("number", "integer"), "-0123456789")


def tagged_head(form: ToolFormat) -> str:
    """A pattern of a call up to its arguments, with a group `name`."""
    before, _, after, *_ = split_shape(form.call)
    ends = rf"<>\n{re.escape(after[:1])}"
    return rf"{loosen(before)}(?P<name>[^{ends}]+)(?=[{ends}]){loosen(after)}"


class TaggedArguments(CallArguments):
    """Values between tags, of the types that `schema` allows: it says what is a text, or the tag.

    A text is certain as it comes, another value at its end. A value may say its own end tag: at the
    end another argument follows, or the end of the call.
    """

    def __init__(self, form: ToolFormat, schema: Mapping[str, Any]) -> None:
        super().__init__()
        self._form, self._schema, self._patterns = form, schema, _patterns(form)
        self._tag = split_shape(form.argument)[-1]
        self._held, self._filled, self._said = "", False, list[str]()
        self._allowed: set[str] | None = None  # the types of the value that is open
        # What of it waits for its end, and whether it is a text: None while that is not known.
        self._kept = list[str]()
        self._is_text: bool | None = None

    def push(self, text: str) -> str:
        """As for all arguments."""
        self._held += text
        while self._read_tag() if self._allowed is None else self._read_value(self._allowed):
            pass
        said, self._said = "".join(self._said), []
        return said

    def _read_tag(self) -> bool:
        """Read the tag that opens an argument, or ends the call. Returns whether there is more."""
        held, (opening, _, end) = self._held, self._patterns
        if opened := opening.match(held, 0, _MOST_TAGS):
            key = opened[1].strip()
            self._said.append(f'{", " if self._filled else "{"}"{escape_text(key)}": ')
            given = self._schema.get("properties", {}).get(key, {})
            self._allowed = types_of(follow_reference(given, self._schema))
            if said := opened.groupdict().get("string"):
                self._allowed = {"string"} if said == "true" else self._allowed - {"string"}
            self._held, self._filled = held[opened.end() :], True
            self._kept, self._is_text = [], True if self._allowed == {"string"} else None
            self._said.append('"' if self._is_text else "")
            return True
        if ended := end.match(held, 0, _MOST_TAGS):
            self._said.append("}" if self._filled else "{}")
            self._stop(held[ended.end() :], whole=True)
        elif len(held) >= _MOST_TAGS or self._form.end.strip() in held:
            self._stop(held, whole=False)
        return False

    def _read_value(self, allowed: set[str]) -> bool:
        """Read the value that is open. Returns whether it has ended."""
        held, tag, at = self._held, self._tag.strip(), 0
        while (at := held.find(tag, at)) >= 0:
            if ended := self._patterns[1].match(held, at, at + _MOST_TAGS):
                self._take(self._before_break(at), allowed)
                self._said.append('"' if self._is_text else _write("".join(self._kept), allowed))
                self._allowed, self._held = None, held[ended.end() :]
                return True
            if self._may_end(held[at + len(tag) : at + _MOST_TAGS]):
                break
            at += len(tag)
        end = len(held) - mark_overlap(held, tag) if at < 0 else at
        self._take(self._before_break(end), allowed)
        return False

    def _before_break(self, end: int) -> int:
        """The place before the line break that belongs to the tag at `end`."""
        return end - (self._tag[0] == "\n" == self._held[max(0, end - 1) : end])

    def _may_end(self, following: str) -> bool:
        """Whether more text may show that the tag before `following` ends the value."""
        begun = "".join(following.split())
        followers = _followers(self._form)
        whole = len(following) + len(self._tag.strip()) >= _MOST_TAGS
        return not whole and any(each.startswith(begun) for each in followers)

    def _take(self, end: int, allowed: set[str]) -> None:
        """Take the text up to `end` as a part of the value."""
        part, self._held = self._held[:end], self._held[end:]
        if self._is_text is None and (first := part.lstrip()[:1]):
            kinds = (allowed or _BEGINNINGS.keys()) - {"string"}
            begun = first == '"' or any(first in _BEGINNINGS.get(kind, "") for kind in kinds)
            self._is_text = not begun
            if self._is_text:
                self._said.append('"')
                part = "".join([*self._kept, part])
        if self._is_text:
            self._said.append(escape_text(part))
        else:
            self._kept.append(part)


@cache
def _patterns(form: ToolFormat) -> tuple[re.Pattern[str], ...]:
    """What finds the tag before a value, that after it, and the end of a call."""
    before, *_, end = split_shape(form.call)
    opening, _, *middle, _, closing = split_shape(form.argument)
    gap = r"(?:\n|(?=[^\n]))" if middle[-1].endswith("\n") else ""
    key = rf"([^<>\n{re.escape(middle[0][:1])}]+)"
    value = "(?P<string>true|false)".join(map(loosen, (*middle[:-1:2], middle[-1].rstrip())))
    mark = re.escape(form.end.strip())
    after = rf"(?:{mark}|{loosen(before)})" if form.brackets and before else mark
    tail = rf"\s{{0,64}}{loosen(end)}"
    return (
        re.compile(rf"\s*{loosen(opening)}{key}{value}{gap}"),
        re.compile(
            rf"{loosen(closing.strip())}"
            rf"(?=\s{{0,64}}{loosen(opening)}|{tail}\s{{0,64}}{after})"
        ),
        re.compile(tail if end.strip() else rf"{tail}(?={mark})"),
    )


@cache
def _followers(form: ToolFormat) -> tuple[str, ...]:
    """What may follow on the end of a value, without spaces."""
    before, *_, end = split_shape(form.call)
    shapes = [split_shape(form.argument)[0], f"{end}{form.end}"]
    shapes += [f"{end}{before}"] if form.brackets else []
    return tuple("".join(shape.split()) for shape in shapes)


def _write(text: str, allowed: set[str]) -> str:
    """In JSON the value that `text` stands for; the text itself where JSON has no such value."""
    return write_json(_value(text, allowed)) or json.dumps(text, ensure_ascii=False)


def _value(text: str, allowed: set[str]) -> Any:
    """The value that `text` stands for: of a type that is `allowed`, else the text."""
    value = _read(text)
    kind = KINDS[type(value)]
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return value if fits else text


def _read(text: str) -> Any:
    """The value that `text` writes as JSON or as Python does, else the text."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=refuse_constant)
    with suppress(ValueError):
        value = read_python_value(text)
        return text if isinstance(value, str) else value
    return text


def make_tagged_rules(
    rule: CallRule, form: ToolFormat, write: Callable[[str], str]
) -> Iterator[str]:
    """The grammar rules of a call; the last, `rule`, is the whole call.

    `write` makes a part of a grammar of a text that has marks. Raises `RequestError` (a field
    inside that of the rule) for a schema that `form` cannot express.
    """
    schema = rule.schema
    before, _, after, _, closing = split_shape(form.call)
    opening, _, end = split_argument(form, is_text=True)
    parts = []
    required = schema.get("required", ())
    for number, (key, value) in enumerate(schema.get("properties", {}).items()):
        place = f"{rule.field}.properties.{key}"
        if not _NAMES.fullmatch(key):
            message = "this model writes no parameter with '<', '>' or a line break in its name"
            raise blame(f"{message}: rename it", place)
        inside = f"{rule.name}_{number}"
        choices: dict[str, list[str]] = {}
        found = _choices(value, schema, place, write(end), write, to_the_letter=rule.to_the_letter)
        for text, choice in found:
            middle = split_argument(form, is_text=text)[1]
            choices.setdefault(write(f"{opening}{key}{middle}"), []).append(choice)
        yield f"{inside}: " + " | ".join(
            f"{tag} ({' | '.join(dict.fromkeys(some))})" for tag, some in choices.items()
        )
        parts.append(inside if key in required else f"{inside}?")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        parts.append("any*")
    begin = write(f"{before}{rule.function}{after}")
    yield f"{rule.name}: {begin} {' '.join(parts)} {write(closing)}"


def _choices(
    schema: Any,
    root: Mapping[str, Any],
    place: str,
    end: str,
    write: Callable[[str], str],
    *,
    to_the_letter: bool,
) -> Iterator[tuple[bool, str]]:
    """The alternatives of a value, each with its end tag, and whether they are texts."""
    for part in split_schema(schema, root):
        said = sorted(part.keys() - NOTES)
        if "string" not in (types_of(part) or {"string"}):
            shared = {key: root[key] for key in DEFINITIONS if key in root}
            yield False, f"{json_rule(shared | part)} {end}"
        elif "enum" in part or "const" in part:
            for value in list_values(part):
                yield isinstance(value, str), f"{write(_spell(value))} {end}"
        elif said and to_the_letter:
            message = f"this model writes texts without quotes, which {said[0]!r} cannot bound"
            raise blame(f"{message}: leave it out", f"{place}.{said[0]}")
        else:
            yield True, "bare"


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
