"""How the served model writes its answers: thoughts, tool calls, text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from tangram.engine.text.codec import TextCodec
from tangram.engine.text.thinking import write_blocks
from tangram.errors import RequestError
from tangram.serve.bodies.structured import Tool
from tangram.serve.formats.calls import CallReader
from tangram.serve.formats.custom_calls import CustomReader
from tangram.serve.formats.thoughts import ChannelReader, Reader, TextReader, ThoughtReader
from tangram.serve.formats.wrapped import WrappedReader
from tangram.types import Marks, ThinkingFormat, ToolFormat

# More tokens than the mark that opens a thought, and the line break after it.
_TAIL_TOKENS = 24
# What may stand between a thought and the answer.
_GAP = r"/\n{0,3}/"


@dataclass(frozen=True)
class AnswerForm:
    """How calls and thoughts are written. `opened` says that the prompt ends inside a thought.

    `marks` are the tokens that mark them, `control_token_ids` all of the model's control tokens.
    """

    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None
    marks: Marks = field(default_factory=Marks)
    control_token_ids: Sequence[int] = ()
    opened: bool = False

    @classmethod
    def of(cls, codec: TextCodec) -> Self:
        """The form of the model behind `codec`."""
        marks, controls = codec.marks, codec.control_token_ids
        return cls(codec.tool_format, codec.thinking_format, marks, controls)

    def after(self, codec: TextCodec, prompt: Sequence[int]) -> AnswerForm:
        """The form of the answer to `prompt`, whose template may have opened the thought."""
        if self.thinking is None or self.thinking.channels:
            return self
        tail = codec.verbatim(prompt[-_TAIL_TOKENS:], "messages")
        return replace(self, opened=tail.rstrip().endswith(self.thinking.begin))

    @property
    def channels(self) -> bool:
        """Whether everything that the model writes is a message on a channel."""
        return self.thinking is not None and self.thinking.channels

    def reader(self, tools: Sequence[Tool]) -> Callable[[], Reader]:
        """Makes readers for an answer that may call `tools`."""
        read = self._reader(tools)
        customs = frozenset(tool.function.name for tool in tools if tool.custom is not None)
        return partial(CustomReader, read, customs) if customs else read

    def _reader(self, tools: Sequence[Tool]) -> Callable[[], Reader]:
        schemas = {tool.function.name: tool.arguments() for tool in tools}
        if self.thinking is not None and self.thinking.channels:
            return partial(ChannelReader, frozenset(schemas))
        calls: Callable[[], Reader] | None = None
        if self.tools is not None and schemas:
            calls = partial(CallReader, self.tools, frozenset(schemas), schemas)
        if self.thinking is None:
            return calls or TextReader
        if self.thinking.answer is not None:
            calls = partial(WrappedReader, self.thinking.answer, calls or TextReader)
        return partial(ThoughtReader, self.thinking, opened=self.opened, rest=calls)

    def adapt_message(self, message: dict[str, Any], field: str) -> dict[str, Any]:
        """`message` as the template takes it.

        Some take arguments as text, some a thought as a block. That of GPT-OSS shows one text and
        one call: raises `RequestError` (`field`) for more calls.
        """
        calls, thought = message.get("tool_calls", ()), message.get("reasoning_content")
        if thought and self.thinking is not None and self.thinking.blocks:
            message = message | {"content": write_blocks(thought, message["content"])}
        if calls and self.tools is not None and self.tools.text_arguments:
            return message | {"tool_calls": list(map(_write_arguments, calls))}
        if not (self.channels and calls):
            return message
        if len(calls) > 1:
            raise RequestError(
                lambda name: (
                    f"{name} has {len(calls)} calls, this model's template shows one a message: "
                    "send a message for each, with its result after it"
                ),
                f"{field}.tool_calls",
            )
        texts = [thought, message["content"]]
        if not all(texts):
            return message
        return message | {"reasoning_content": "\n".join(map(str, texts)), "content": ""}

    def list_shown_marks(self, tools: Sequence[Tool]) -> Marks:
        """The control tokens to keep in the text of an answer that may call `tools`."""
        return self.marks if tools or self.thinking is not None else Marks()

    def write_literal(self, text: str) -> str:
        """`text` as a part of a grammar, its marks as their tokens; empty for none.

        A mark that is an ordinary token may be spelled with others, too. The token is named because
        llguidance chooses the tokens where only one text may follow, and knows none that are added.
        """
        marks = {name: f"<[{number}]>" for number, name in self.marks.names.items()}
        for number, word in self.marks.words.items():
            marks[word] = f"(<[{number}]> | {json.dumps(word)})"
        longest = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
        split = re.split(f"({longest})", text) if marks else [text]
        return " ".join(marks.get(part, json.dumps(part)) for part in split if part)

    def list_rules_up_to(self, mark: str, rule: str, text: str) -> list[str]:
        """The rules of `rule`: the terminal `text` up to the end of `mark`, however it is spelled.

        `mark` ends the text at once, whatever else `text` would allow.
        """
        spelled = f"[lazy]: {text} {json.dumps(mark)}"
        places = [mark.index(name) for name in self.marks.names.values() if name in mark]
        if not places:
            return [f"{rule}{spelled}"]
        head, token = mark[: min(places)], self.write_literal(mark[min(places) :])
        rules = [f"{rule}: {text} {token} | {rule}_spelled", f"{rule}_spelled{spelled}"]
        if head:  # a text that ends with it: only a token ends a text that may have more
            up_to = f"{rule.upper()}_UP_TO"
            rules[0] = f"{rule}: {up_to} {token} | {rule}_spelled"
            rules.append(f"{up_to}: {text} {json.dumps(head)}")
        return rules

    def describe_thought(self) -> tuple[str, list[str]]:
        """The rule for a thought before a constrained answer, and the rules that it needs.

        Only for thoughts between marks: messages on channels have a grammar of their own.
        """
        if self.thinking is None or self.channels:
            return "", []
        begin, rules = self.write_literal(self.thinking.begin), self._list_thought_rules()
        return (f"({begin})? thought GAP" if self.opened else f"({begin} thought GAP)?"), rules

    def describe_answer(self, rule: str) -> str:
        """The rule for an answer that is `rule`, also between the model's marks around answers."""
        if self.thinking is None or self.thinking.answer is None:
            return rule
        begin, end = map(self.write_literal, self.thinking.answer)
        return f"({rule} | {begin} GAP {rule} GAP {end} GAP)"

    def describe_thought_before(self, free: str, resumed: str) -> tuple[str, list[str]]:
        """The rule for the answer `free`, or a thought and `resumed`, and the rules it needs.

        What a thought says of calls is a part of the thought, also if it never ends.
        """
        if self.thinking is None or self.channels:
            return free, []
        thought, rules = f"(thought {resumed} | THOUGHT)", self._list_thought_rules()
        if self.opened:
            return f"({self.write_literal(self.thinking.begin)})? {thought}", rules
        opening = self.list_rules_up_to(self.thinking.begin, "opening", r"/\s*/")
        return f"{free} | opening {thought}", [*opening, *rules]

    def _list_thought_rules(self) -> list[str]:
        assert self.thinking is not None
        end = self.list_rules_up_to(self.thinking.end, "thought", "THOUGHT")
        return ["THOUGHT: /(.|\\n)*/", f"GAP: {_GAP}", *end]


def _write_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """`call` with its arguments as text."""
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": text}}
