"""Grammars of answers (llguidance's Lark dialect): JSON, tool calls, thoughts before them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.engine.text.formats import split_argument, split_shape
from tangram.serve.bodies.json_schema import JSON_GAP, json_rule
from tangram.serve.bodies.schema_parts import CallRule
from tangram.serve.bodies.structured import INPUT, Tool
from tangram.serve.formats.forms import AnswerForm
from tangram.serve.formats.literals import list_literal_rules, make_literal_rules
from tangram.serve.formats.tagged import make_tagged_rules
from tangram.types import CallStyle, ToolFormat

_TEXT = "TEXT: /(.|\\n)*/"
_JSON = re.compile(r'"[^"]*"|.')  # the parts of a call's head
_STAGES = '("analysis" | "commentary")'
_HOLES = {"index": "/[0-9]{1,3}/", "callid": ""}
_WRITERS = {
    CallStyle.TAGGED: make_tagged_rules,
    CallStyle.PYTHON: make_literal_rules,
    CallStyle.QUOTED: make_literal_rules,
}
# Styles whose texts are written as they are: only these can follow a grammar in Lark.
UNESCAPED = (CallStyle.TAGGED, CallStyle.QUOTED)
_NO_FORM = AnswerForm()


def answer_grammar(schema: dict[str, Any], form: AnswerForm = _NO_FORM) -> str:
    """The grammar of answers that `schema` allows; models that think may think first."""
    if form.channels:
        return _source(_channels(form, f"answer: {json_rule(schema)}", "", forced=False))
    before, rules = form.describe_thought()
    head = ["%llguidance {}"] if rules else []
    start = f"start: {before} {form.describe_answer('answer')}"
    return _source([*head, start, f"answer: {json_rule(schema)}", *rules])


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of answers that may call `tools`, in the form of the model.

    Where `forced`, the answer only calls. With `parallel` there may be several calls. An answer
    without a call follows `schema`; None is any text, with any control tokens. `answer` says how
    calls and thoughts are written.
    """

    tools: Sequence[Tool]
    form: ToolFormat
    forced: bool
    parallel: bool
    schema: dict[str, Any] | None
    answer: AnswerForm = field(default_factory=AnswerForm)

    def source(self) -> str:
        """The grammar. Raises `RequestError` if the form cannot express a tool's schema."""
        if self.form.style is CallStyle.CHANNEL:
            answer = "" if self.schema is None else f"answer: {json_rule(self.schema)}"
            rules = _channels(self.answer, answer, "body", forced=self.forced)
        else:
            rules = self._start()
        return _source(["%llguidance {}", *rules, *self._bodies()])

    def describe_arguments(self) -> str:
        """A grammar of the arguments of the `tools` alone; any model's tokens can spell them."""
        if self.form.style in _WRITERS:
            return _source(["%llguidance {}", "start: body", *self._bodies()])
        either = " | ".join(json_rule(tool.arguments()) for tool in self.tools)
        return _source([f"start: {either}"])

    def _start(self) -> list[str]:
        calls = self._calls()
        before, thought = self.answer.describe_thought()
        if self.forced:
            return [f"start: {before} calls", *calls, *thought]
        if self.schema is not None:
            answer = f"answer: {json_rule(self.schema)}"
            either = f"(calls | {self.answer.describe_answer('answer')})"
            return [f"start: {before} {either}", *calls, answer, *thought]
        if not self.form.begin:
            free, resumed = self._list_unmarked(), "GAP free"
        else:
            free, resumed = self._prose(), "free"
        start, thought = self.answer.describe_thought_before("free", resumed)
        return [f"start: {start}", *free, *calls, *thought]

    def _calls(self) -> list[str]:
        """Rules of `calls`; `rest` is the first of them, or all, after its mark."""
        form, write = self.form, self.answer.write_literal
        begin, end = write(form.begin), write(form.end)
        if form.brackets is not None:
            opening, closing = write(form.brackets[0]), form.brackets[1] + form.end
            # Spaces alone, for what comes between calls may begin with the same.
            words = closing.lstrip()
            last = f"{write(closing[: len(closing) - len(words)])} {write(words)}"
            gap = '" "?' if opening and begin else ""  # Mistral's tokenizers may begin with one
            more = f"({write(form.between)} body)*" if self.parallel else ""
            return [f"calls: {begin} rest", f"rest: {gap} {opening} body {more} {last}"]
        gap, more = write(form.between), ""
        if self.parallel and begin:  # what is between calls may end the last of them, too
            more = f"({gap} call)* {gap}{'?' if gap else ''}"
        return [f"calls: call {more}", f"call: {begin} rest", f"rest: body {end}"]

    def _prose(self) -> list[str]:
        """Rules for any text. After the beginning of a call, the rest must be a call."""
        mark = self.form.begin.strip()
        note, rules = self._notes(mark)
        gap = self.form.begin[self.form.begin.index(mark) + len(mark) :]
        alone = self.form.brackets is None and not self.form.end
        more = "call*" if alone and self.parallel else ""
        rules += [_TEXT, *self.answer.list_rules_up_to(mark, "head", "TEXT")]
        rules += [f"spoken: head {_quote(gap)} rest {more}"]
        if self.parallel and self.form.end:
            return [f"free: (spoken{f' | {note}' if note else ''})* TEXT", *rules]
        return [f"free: {f'{note}*' if note else ''} (spoken | TEXT)", *rules]

    def _list_unmarked(self) -> list[str]:
        """Rules for calls without marks: at the beginning, or after a thought."""
        note, rules = self._notes("")
        opening = "".join(self.form.brackets or ())[:1]
        before, _, after, *_ = split_shape(self.form.call)
        called = f"({'|'.join(tool.function.name for tool in self.tools)}){re.escape(after)}"
        begun = re.escape(opening + before) if before else re.escape(opening) + called
        text = f"TEXT: /(.|\\n)*/ & ~/{begun}(.|\\n)*/"
        return [f"free: {f'{note}*' if note else ''} (calls | TEXT)", text, *rules]

    def _notes(self, mark: str) -> tuple[str, list[str]]:
        """The rule of text up to a control token that is not of `mark`; empty for none."""
        names = self.answer.marks.names
        controls = self.answer.control_token_ids
        ids = [str(token) for token in controls if token not in names or names[token] not in mark]
        return ("note", [f"note: TEXT <[{','.join(ids)}]>"]) if ids else ("", [])

    def _bodies(self) -> Iterator[str]:
        yield f"body: {' | '.join(f'body_{at}' for at in range(len(self.tools)))}"
        for at, tool in enumerate(self.tools):
            yield from self._body(f"body_{at}", tool, f"tools[{at}].function.parameters")
        if self.form.style is CallStyle.TAGGED:
            opening, middle, end = split_argument(self.form, is_text=True)
            other, write = split_argument(self.form, is_text=False)[1], self.answer.write_literal
            yield from ["BARE: /(.|\\n)*/", *self.answer.list_rules_up_to(end, "bare", "BARE")]
            values = [f"{write(middle)} bare"]
            values += [f"{write(other)} {json_rule({})} {write(end)}"] if other != middle else []
            yield f'any: {write(opening)} /[^<>"\\n]+/ ({" | ".join(values)})'
        elif self.form.style in _WRITERS:
            text = self.answer.list_rules_up_to(self.form.quote, "literal_text", "LITERAL")
            yield from list_literal_rules(self.form, self.answer.write_literal, text)

    def _body(self, rule: str, tool: Tool, field: str) -> Iterator[str]:
        name, arguments = tool.function.name, tool.arguments()
        form, write = self.form, self.answer.write_literal
        if tool.custom is not None and tool.custom.lark and form.style in UNESCAPED:
            quoted = f"{form.quote}${INPUT}{form.quote}"
            opening, middle, end = split_argument(form, is_text=True)
            given = f"{opening}{INPUT}{middle}{quoted}{end}"
            call = form.call.replace("$name", name).replace("$arguments", given)
            before, after = call.split(f"${INPUT}")
            yield f"{rule}: {write(before)} %lark {{\n{tool.custom.lark}\n}} {write(after)}"
        elif form.style in _WRITERS:
            letter = self.forced or tool.function.strict
            wanted = CallRule(rule, name, arguments, field, to_the_letter=letter)
            yield from _WRITERS[form.style](wanted, form, write)
        elif form.style is CallStyle.CHANNEL:
            channel = f"{write('<|channel|>')} {_STAGES}"
            to, message = _quote(f" to=functions.{name}"), write("<|message|>")
            yield (
                f"{rule}: ({channel} {to} | {to} {channel}) kind? {message} {json_rule(arguments)}"
            )
        else:
            # An answer by a schema may begin like a call without a mark. llguidance goes on with
            # the longest literal that fits, so that these have to be the same for both.
            shared = not form.begin and self.schema is not None
            holes = _HOLES | {"arguments": json_rule(arguments)}
            parts = enumerate(split_shape(form.call.replace("$name", name)))
            written = (
                holes[part] if at % 2 else _write_lexemes(part) if shared else write(part)
                for at, part in parts
            )
            yield f"{rule}: {' '.join(written)}"


def _channels(form: AnswerForm, answer: str, body: str, *, forced: bool) -> list[str]:
    """Rules for messages of GPT-OSS: thoughts and notes, then a call, the `answer` or any text."""
    written = form.write_literal
    channel, message, constrain = (
        written("<|channel|>"),
        written("<|message|>"),
        written("<|constrain|>"),
    )
    final = f'final: {channel} "final" kind? {message} {"answer" if answer else "TEXT"}'
    stage = '"analysis"' if forced or answer else _STAGES
    last = ["call" if body else "", "" if forced else "final", "" if forced or answer else "note"]
    rules = [
        f"start: turn* ({' | '.join(filter(None, last))})",
        f"turn: note {written('<|end|><|start|>assistant')}",
        f"note: {channel} {stage} {message} TEXT",
        f'kind: (" " | {constrain} | " " {constrain}) /[A-Za-z]{{1,16}}/',
        _TEXT,
        final,
        answer,
    ]
    return [*rules, f"call: {body}"] if body else rules


def _source(rules: Sequence[str]) -> str:
    return "\n".join([*filter(None, rules), ""])


def _write_lexemes(text: str) -> str:
    return " ".join(map(_write_json, _JSON.findall(text)))


def _write_json(lexeme: str) -> str:
    return JSON_GAP if lexeme == " " else _quote(lexeme)


def _quote(literal: str) -> str:
    return json.dumps(literal) if literal else ""
