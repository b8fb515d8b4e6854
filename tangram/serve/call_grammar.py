"""Grammars of answers (llguidance's Lark dialect): JSON, tool calls, thoughts before them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.serve.forms import AnswerForm
from tangram.serve.json_schema import JSON_GAP, json_rule
from tangram.serve.structured import Tool
from tangram.serve.tagged import BARE_TEXT, make_tagged_rules
from tangram.types import CallStyle, ToolFormat

_TEXT = "TEXT: /(.|\\n)*/"
_JSON = re.compile(r'"[^"]*"|.')  # the parts of a call's head
_STAGES = '("analysis" | "commentary")'
_NO_FORM = AnswerForm()


def answer_grammar(schema: dict[str, Any], form: AnswerForm = _NO_FORM) -> str:
    """The grammar of answers that `schema` allows; models that think may think first."""
    if form.channels:
        return _source(_channels(form, f"answer: {json_rule(schema)}", "", forced=False))
    before, rules = form.describe_thought()
    head = ["%llguidance {}"] if rules else []
    return _source(
        [
            *head,
            f"start: {before} {json_rule(schema)}" if before else f"start: {json_rule(schema)}",
            *rules,
        ]
    )


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
        if self.form.style is CallStyle.TAGGED:
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
            return [f"start: {before} (calls | answer)", *calls, answer, *thought]
        if not self.form.begin:
            free, resumed = self._list_unmarked(), "GAP free"
        else:
            free, resumed = self._prose(), "free"
        start, thought = self.answer.describe_thought_before("free", resumed)
        return [f"start: {start}", *free, *calls, *thought]

    def _calls(self) -> list[str]:
        """Rules of `calls`; `rest` is the first of them, or all, after its mark."""
        form = self.form
        begin, end = self.answer.write_literal(form.begin), self.answer.write_literal(form.end)
        several = self.parallel and bool(begin)
        if form.style is CallStyle.LIST:
            more = '(", " body)*' if several else ""
            return [f"calls: {begin} rest", f'rest: " "? "[" body {more} "]"']
        between = "" if form.style is CallStyle.NAMED else '"\\n"'
        more = f"({between} call)*" if several else ""
        return [f"calls: call {more}", f"call: {begin} rest", f"rest: body {end}"]

    def _prose(self) -> list[str]:
        """Rules for any text. After the beginning of a call, the rest must be a call."""
        mark = self.form.begin.strip()
        note, rules = self._notes(mark)
        gap = self.form.begin[self.form.begin.index(mark) + len(mark) :]
        more = "call*" if self.form.style is CallStyle.NAMED and self.parallel else ""
        rules += [_TEXT, *self.answer.list_rules_up_to(mark, "head", "TEXT")]
        rules += [f"spoken: head {_quote(gap)} rest {more}"]
        if self.parallel and self.form.end:
            return [f"free: (spoken{f' | {note}' if note else ''})* TEXT", *rules]
        return [f"free: {f'{note}*' if note else ''} (spoken | TEXT)", *rules]

    def _list_unmarked(self) -> list[str]:
        """Rules for calls without marks: at the beginning, or after a thought."""
        note, rules = self._notes("")
        text = 'TEXT: /(.|\\n)*/ & ~/\\{"name": "(.|\\n)*/'
        return [f"free: {f'{note}*' if note else ''} (calls | TEXT)", text, *rules]

    def _notes(self, mark: str) -> tuple[str, list[str]]:
        """The rule of text up to a control token other than `mark`; empty where there is none."""
        names = self.answer.marks.names
        controls = self.answer.control_token_ids
        ids = [str(number) for number in controls if names.get(number) != mark]
        return ("note", [f"note: TEXT <[{','.join(ids)}]>"]) if ids else ("", [])

    def _bodies(self) -> Iterator[str]:
        yield f"body: {' | '.join(f'body_{at}' for at in range(len(self.tools)))}"
        for at, tool in enumerate(self.tools):
            yield from self._body(f"body_{at}", tool, f"tools[{at}].function.parameters")
        if self.form.style is CallStyle.TAGGED:
            yield from BARE_TEXT

    def _body(self, rule: str, tool: Tool, field: str) -> Iterator[str]:
        name, arguments = tool.function.name, tool.arguments()
        style, written = self.form.style, self.answer.write_literal
        if style is CallStyle.TAGGED:
            letter = self.forced or tool.function.strict
            yield from make_tagged_rules(rule, name, arguments, field, to_the_letter=letter)
        elif style is CallStyle.NAMED:
            yield f"{rule}: {_quote(name)} {written(self.form.arguments)} {json_rule(arguments)}"
        elif style is CallStyle.CHANNEL:
            channel = f"{written('<|channel|>')} {_STAGES}"
            to, message = _quote(f" to=functions.{name}"), written("<|message|>")
            yield (
                f"{rule}: ({channel} {to} | {to} {channel}) kind? {message} {json_rule(arguments)}"
            )
        else:
            head = f'{{"name": "{name}", "{self.form.arguments}": '
            # An answer by a schema may begin like a call without a mark. llguidance goes on with
            # the longest literal that fits, so that these have to be the same for both.
            shared = not self.form.begin and self.schema is not None
            begun = " ".join(map(_write_json, _JSON.findall(head))) if shared else _quote(head)
            yield f'{rule}: {begun} {json_rule(arguments)} "}}"'


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


def _write_json(lexeme: str) -> str:
    return JSON_GAP if lexeme == " " else _quote(lexeme)


def _quote(literal: str) -> str:
    return json.dumps(literal) if literal else ""
