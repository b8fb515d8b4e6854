"""Calls of tools in what a model writes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.engine.text.formats import TOOL_FORMATS
from tangram.serve.formats.calls import CallReader
from tangram.types import ToolFormat
from tests.recorded_calls import Part, read_parts

HERMES = TOOL_FORMATS["hermes"]
LLAMA = TOOL_FORMATS["llama3"]
NAMES = frozenset({"add", "look"})
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
LOOK = '<tool_call>{"arguments": {}, "name": "look"}</tool_call>'
BEGUN = ("add", '{"a": \n')
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
SPELLED = json.dumps({"name": "look", "arguments": {"tag": '<tool_call> "</tool_call>\\'}})
NAMES_MARKS = f"<tool_call>{SPELLED}</tool_call>"
LISTED = TOOL_FORMATS["mistral"]
LISTS_MARKS = '[TOOL_CALLS] [{"name": "look", "arguments": {"tag": "[TOOL_CALLS]"}}]'


def parts(form: ToolFormat, pieces: list[str]) -> list[Part]:
    return read_parts(CallReader(form, NAMES), pieces)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "Nothing to call.\n ", ["Nothing to call.\n "]),
        (HERMES, ADD, [("add", {"a": 1, "b": [2, "é"]})]),
        (
            HERMES,
            f"I look. \n{LOOK}\n{ADD}\n",
            ["I look.", ("look", {}), ("add", {"a": 1, "b": [2, "é"]})],
        ),
        (HERMES, f"{LOOK} done", [("look", {}), " done"]),
        # A call that has begun stays one: its arguments are what came of them.
        (HERMES, BROKEN, [BEGUN]),
        (HERMES, f"{BROKEN}{LOOK}", [BEGUN, ("look", {})]),
        (HERMES, f"{BROKEN} {LOOK} a", [BEGUN, ("look", {}), " a"]),
        (HERMES, '<tool_call>\n{"name": "add", "argu', ['<tool_call>\n{"name": "add", "argu']),
        *(
            (HERMES, text, [text])
            for text in (
                '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            )
        ),
        (
            HERMES,
            f"<tool_call>{'[' * 100_000}</tool_call>",
            [f"<tool_call>{'[' * 100_000}</tool_call>"],
        ),
        (HERMES, "Hm. \n<tool_call>\n{", ["Hm. \n<tool_call>\n{"]),
        (HERMES, f"Hm. \n{BROKEN}", ["Hm.", BEGUN]),
        *(
            (form, call, [("look", {"tag": tag})] * 2)
            for form, tag, call in (
                (HERMES, '<tool_call> "</tool_call>\\', f"{NAMES_MARKS}\n{NAMES_MARKS}"),
                (LISTED, "[TOOL_CALLS]", f"{LISTS_MARKS}{LISTS_MARKS}"),
            )
        ),
        (HERMES, "a <tool> or a <tool_c", ["a <tool> or a <tool_c"]),
        (LLAMA, ' {"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        (LLAMA, '{"age": 3}', ['{"age": 3}']),
        (LLAMA, '{"name": "add", "para', ['{"name": "add", "para']),
        (LLAMA, 'No: {"name": "add", "parameters": {}}', ['No: {"name": "add", "parameters": {}}']),
        (LLAMA, 'a\n{"name": "add", "parameters": {}}', ['a\n{"name": "add", "parameters": {}}']),
        (LLAMA, "", []),
    ],
    ids=lambda value: str(value)[:50],
)
def test_text_and_calls_are_told_apart_wherever_the_text_is_cut(
    form: ToolFormat, text: str, expected: list[Part]
) -> None:
    assert parts(form, [text]) == expected
    if len(text) < 1000:
        assert parts(form, list(text)) == expected


@given(
    text=st.lists(
        st.sampled_from(
            [ADD, LOOK, BROKEN, NAMES_MARKS, "<tool", "_call>", "</tool_call>", "hi", " \n", "{"]
        )
    ).map("".join),
    cuts=st.lists(st.integers(0, 200)),
)
def test_cutting_changes_nothing(text: str, cuts: list[int]) -> None:
    at = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(at)]
    assert parts(HERMES, pieces) == parts(HERMES, [text])


@given(text=st.text(alphabet="ab \n<{tool_call>"))
def test_text_without_calls_comes_out_as_it_is(text: str) -> None:
    assert "".join(map(str, parts(HERMES, list(text)))) == text


def test_text_is_not_held_back_longer_than_it_may_be_a_mark() -> None:
    reader = CallReader(HERMES, NAMES)
    assert "".join(map(str, reader.push(["Hello <b"]))) == "Hello <b"
    assert "".join(map(str, reader.push(["> <tool_"]))) == ">"
    assert "".join(map(str, reader.push(["s>"]))) == " <tool_s>"
