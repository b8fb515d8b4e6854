"""Thoughts, text and calls in what models write: outputs of each form, cut anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tangram.engine.text.formats import THINKING_FORMATS, TOOL_FORMATS
from tangram.serve.formats.calls import ArgumentText, Call, CallReader
from tangram.serve.formats.thoughts import ChannelReader, Reader, TextReader, Thought, ThoughtReader
from tangram.serve.formats.wrapped import WrappedReader
from tangram.types import Mark, Piece, ThinkingFormat, ToolFormat
from tests.recorded_calls import join_parts, read_arguments

HERMES = TOOL_FORMATS["hermes"]
LLAMA = TOOL_FORMATS["llama3"]
LIST = TOOL_FORMATS["mistral"]
NAMED = TOOL_FORMATS["mistral_named"]
TAGGED = TOOL_FORMATS["qwen3_coder"]
THINK = ThinkingFormat("<think>", "</think>")
NAMES = frozenset({"add", "look", "get_current_weather"})
SCHEMAS = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"$ref": "#/$defs/B"},
            "many": {"type": "array"},
            "on": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"B": {"type": "string"}},
    }
}
Said = list[object]


def calls(form: ToolFormat) -> Callable[[], CallReader]:
    return partial(CallReader, form, NAMES, SCHEMAS)


def thinks(form: ToolFormat | None = None, *, opened: bool = False) -> Callable[[], Reader]:
    return partial(ThoughtReader, THINK, opened=opened, rest=None if form is None else calls(form))


def wraps(name: str, form: ToolFormat | None = None) -> Callable[[], Reader]:
    thinking = THINKING_FORMATS[name]
    assert thinking.answer is not None
    rest = TextReader if form is None else calls(form)
    wrapped = partial(WrappedReader, thinking.answer, rest)
    return partial(ThoughtReader, thinking, opened=True, rest=wrapped)


CHANNELS = partial(ChannelReader, NAMES)
# As the tokens of ordinary text spell the names of marks: letter by letter.
SPELLED = "<|\u2063{}|>"
END, CALLED, AGAIN = (SPELLED.format(name) for name in ("end", "call", "start"))
LOOK = '{"name": "look", "arguments": {}}'
LOOK_CALL = f"<tool_call>\n{LOOK}\n</tool_call>"
HM, SAID, RESPONSE = "Hm.\n</think>\n\n\n", [("", "Hm.")], '{"a": "<response></response>"}'
FINAL = "<|channel|>final<|message|>It is 25°C."
ANALYSIS = "<|channel|>analysis<|message|>The user asks for the weather.<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
HEADED = " to=functions.look<|channel|>commentary json<|message|>{}"
OUTPUTS: list[tuple[str, Callable[[], Reader], str, Said]] = [
    # Qwen3: the thought between marks on lines of their own.
    ("thought", thinks(), "<think>\nHm, 2 < 3.\n</think>\n\nYes.", [("", "Hm, 2 < 3."), "Yes."]),
    ("no thought", thinks(), "Yes. <think>No</think>", ["Yes. <think>No</think>"]),
    ("empty thought", thinks(), "<think>\n\n</think>\n\nYes.", ["Yes."]),
    ("half a thought", thinks(), "<think>\nHm, </th", [("", "Hm, </th")]),
    ("half a mark", thinks(), "<thi", ["<thi"]),
    (
        "thought and call",
        thinks(HERMES),
        f"<think>\nA</think>\n\nB\n{LOOK_CALL}",
        [("", "A"), "B", ("look", {})],
    ),
    ("call thought of", thinks(HERMES), f"<think>{LOOK_CALL}</think>No.", [("", LOOK_CALL), "No."]),
    # DeepSeek-R1: the prompt has opened the thought.
    ("opened", thinks(opened=True), "Hm.\n</think>\n\nYes.", [("", "Hm."), "Yes."]),
    ("opened twice", thinks(opened=True), "<think>\nHm.\n</think>\n\nYes.", [("", "Hm."), "Yes."]),
    ("opened, cut", thinks(opened=True), "Hm, still ", [("", "Hm, still")]),
    ("opened, nothing", thinks(opened=True), "", []),
    # ERNIE 4.5: the text of the answer between marks of its own.
    (
        "wrapped",
        wraps("ernie"),
        f"{HM}<response>\nYes. \n\nNo.\n</response>\n",
        [*SAID, "Yes. \n\nNo."],
    ),
    ("wrapped, on one line", wraps("ernie"), f"{HM}<response>Yes.</response>", [*SAID, "Yes."]),
    ("wrapped, nothing", wraps("ernie"), f"{HM}<response>\n</response>", SAID),
    ("wrapped, cut", wraps("ernie"), f"{HM}<response>\nYes, </res", [*SAID, "Yes, </res"]),
    ("wrapped, cut at a space", wraps("ernie"), f"{HM}<response>\nYes, ", [*SAID, "Yes,"]),
    ("wrapped, cut at the mark", wraps("ernie"), f"{HM}<resp", [*SAID, "<resp"]),
    ("not wrapped", wraps("ernie"), f"{HM}Yes.\n</response>\n", [*SAID, "Yes.\n</response>\n"]),
    (
        "wrapped, its marks in the text",
        wraps("ernie", HERMES),
        f"{HM}<response>\nWrite <response>a</response>\nor </response></response>\n",
        [*SAID, "Write <response>a</response>\nor </response>"],
    ),
    (
        "wrapped, then calls",
        wraps("ernie", HERMES),
        f"{HM}<response>\nI look.\n</response>\n\n{LOOK_CALL}\n\n{LOOK_CALL}\n",
        [*SAID, "I look.", ("look", {}), ("look", {})],
    ),
    (
        "a call that is wrapped, too",
        wraps("ernie", HERMES),
        f"{HM}<response>I look. {LOOK_CALL}\n</response>",
        [*SAID, "I look.", ("look", {})],
    ),
    ("calls, not wrapped", wraps("ernie", HERMES), f"{HM}{LOOK_CALL}\n", [*SAID, ("look", {})]),
    (
        "marks of the answer in arguments",
        wraps("ernie", HERMES),
        f"{HM}{LOOK_CALL.replace('{}', RESPONSE)}\n",
        [*SAID, ("look", {"a": "<response></response>"})],
    ),
    # GPT-OSS: a channel a message.
    (
        "channels",
        CHANNELS,
        ANALYSIS + FINAL,
        [("", "The user asks for the weather."), "It is 25°C."],
    ),
    ("final only", CHANNELS, FINAL, ["It is 25°C."]),
    (
        "two thoughts",
        CHANNELS,
        ANALYSIS + ANALYSIS + FINAL,
        [("", "The user asks for the weather.\nThe user asks for the weather."), "It is 25°C."],
    ),
    (
        "call",
        CHANNELS,
        f'{ANALYSIS}{TO}{{"location": "Tokyo"}}',
        [("", "The user asks for the weather."), ("get_current_weather", {"location": "Tokyo"})],
    ),
    ("call, head first", CHANNELS, HEADED, [("look", {})]),
    (
        "call, marks spelled in its arguments",
        CHANNELS,
        f'{TO}{{"a": "{END}\\"{CALLED}", "b": "{AGAIN}"}}<|call|><|start|>assistant{FINAL}',
        [("get_current_weather", {"a": '<|end|>"<|call|>', "b": "<|start|>"}), "It is 25°C."],
    ),
    (
        "marks spelled in thought and text",
        CHANNELS,
        f"<|channel|>analysis<|message|>It ends by {END}.<|end|><|start|>assistant"
        f"<|channel|>final<|message|>Write {END}{AGAIN}assistant.<|end|>",
        [("", "It ends by <|end|>."), "Write <|end|><|start|>assistant."],
    ),
    ("marks spelled without a head", CHANNELS, f"A {END} b", ["A <|end|> b"]),
    (
        "marks inside a text",
        CHANNELS,
        f"{FINAL}<|channel|>a<|constrain|>b<|message|>c<|end|>",
        ["It is 25°C.<|channel|>a<|constrain|>b<|message|>c"],
    ),
    ("call with its mark", CHANNELS, f"{HEADED}<|call|>", [("look", {})]),
    (
        "said before a call",
        CHANNELS,
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HEADED}",
        ["I look.", ("look", {})],
    ),
    ("call of nobody", CHANNELS, TO.replace("get_current", "get") + "{}", ["{}"]),
    ("half a call", CHANNELS, f'{TO}{{"loc', [("get_current_weather", '{"loc')]),
    (
        "half a head",
        CHANNELS,
        f"{ANALYSIS}<|channel|>fin",
        [("", "The user asks for the weather.")],
    ),
    ("no channels", CHANNELS, "Hello, to=you!", ["Hello, to=you!"]),
    # Off the form: nothing that the model has written is lost.
    ("a word", CHANNELS, "paris", ["paris"]),
    ("a word, ended", CHANNELS, "paris<|end|>", ["paris"]),
    ("the role", CHANNELS, "assistant<|end|>", ["assistant"]),
    ("half a recipient", CHANNELS, "to<|return|>", ["to"]),
    ("spaces", CHANNELS, " ", [" "]),
    ("a word, then a message", CHANNELS, f"sure {FINAL}", ["sure \nIt is 25°C."]),
    ("a word, then a text", CHANNELS, "paris<|message|>It is.", ["paris\nIt is."]),
    ("a word, then a turn", CHANNELS, f"yes<|end|><|start|>assistant{FINAL}", ["yes\nIt is 25°C."]),
    ("a word instead of the role", CHANNELS, "A<|end|><|start|>b<|end|>", ["A\nb"]),
    ("the role alone", CHANNELS, f"{FINAL}<|end|><|start|>assist", ["It is 25°C."]),
    (
        "words in a head",
        CHANNELS,
        "<|channel|>final and so on<|message|>It is.",
        [" and so on\nIt is."],
    ),
    ("words for a text", CHANNELS, "<|channel|>final it is 25", [" it is 25"]),
    (
        "a head that is too long",
        CHANNELS,
        f"<|channel|>{'so ' * 100}<|message|>It is.",
        [f"{'so ' * 100}\nIt is."],
    ),
    (
        "text before a thought",
        CHANNELS,
        f"Hm. {ANALYSIS}{FINAL}",
        ["Hm. ", ("", "The user asks for the weather."), "\nIt is 25°C."],
    ),
    ("cut while thinking", CHANNELS, "<|channel|>analysis<|message|>The us", [("", "The us")]),
    ("constrained", CHANNELS, "<|channel|>final <|constrain|>json<|message|>{}", ["{}"]),
    # Llama 3.x: bare JSON, one or more; some write the other name.
    (
        "llama",
        calls(LLAMA),
        '{"type": "function", "name": "look", "parameters": {"a": "b{}"}}',
        [("look", {"a": "b{}"})],
    ),
    (
        "llama, two",
        calls(LLAMA),
        '{"name": "look", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
        [("look", {}), ("add", {"a": 1})],
    ),
    ("llama, other name", calls(LLAMA), LOOK, [("look", {})]),
    (
        "llama, one wrong",
        calls(LLAMA),
        f'{LOOK}; {{"name": "rm"}}',
        [("look", {}), '{"name": "rm"}'],
    ),
    # Mistral before and after 2025.
    (
        "list",
        calls(LIST),
        f'[TOOL_CALLS] [{LOOK}, {{"name": "add", "arguments": {{"a": 3.5}}}}]',
        [("look", {}), ("add", {"a": 3.5})],
    ),
    (
        "list, ids",
        calls(LIST),
        '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "abcdefghi"}]',
        [("look", {})],
    ),
    ("list, text before", calls(LIST), f"I look. [TOOL_CALLS][{LOOK}]", ["I look.", ("look", {})]),
    ("list, cut", calls(LIST), f"[TOOL_CALLS][{LOOK}, ", [("look", {})]),
    (
        "named",
        calls(NAMED),
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look[ARGS]{}',
        [("add", {"a": 1}), ("look", {})],
    ),
    ("named, id", calls(NAMED), "[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}", [("look", {})]),
    ("named, wrong", calls(NAMED), "[TOOL_CALLS]rm[ARGS]{}", ["[TOOL_CALLS]rm[ARGS]{}"]),
    # Qwen3-Coder, Qwen3.5: values are bare, their types are the schema's.
    (
        "tagged",
        calls(TAGGED),
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2\nlines\n</parameter>\n"
        '<parameter=many>\n["x", '
        "1]\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>",
        ["I add.", ("add", {"a": 1, "b": "2\nlines", "many": ["x", 1], "on": True})],
    ),
    (
        "tagged, nothing",
        calls(TAGGED),
        "<tool_call>\n<function=look>\n</function>\n</tool_call>",
        [("look", {})],
    ),
    (
        "tagged, marks in a value",
        calls(TAGGED),
        "<tool_call>\n<function=add>\n<parameter=b>\na</parameter>b\n</tool_call>\n</parameter>\n"
        '<parameter=many>\n["</function></tool_call>"]\n</parameter>\n</function>\n</tool_call> x',
        [("add", {"b": "a</parameter>b\n</tool_call>", "many": ["</function></tool_call>"]}), " x"],
    ),
    (
        "tagged, null or text",
        calls(TAGGED),
        "<tool_call><function=add><parameter=maybe>null</parameter></function></tool_call>"
        "<tool_call><function=add><parameter=maybe>12</parameter></function></tool_call>",
        [("add", {"maybe": None}), ("add", {"maybe": "12"})],
    ),
    (
        "tagged, wrong",
        calls(TAGGED),
        "<tool_call>\n<function=look>\nx</function>\n</tool_call>",
        [("look", ""), "x</function>\n"],
    ),
]


def cut(reader: Reader, text: str) -> list[Piece]:
    """`text` in the smallest pieces: for channels, whose marks are control tokens, and letters."""
    if not isinstance(reader, ChannelReader):
        return list(text)
    pieces: list[Piece] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        mark = part.startswith("<|") and part.endswith("|>") and "\u2063" not in part
        pieces += [Mark(part)] if mark else list(part.replace("\u2063", ""))
    return pieces


def read(reader: Reader, pushed: Iterable[Sequence[Piece]]) -> Said:
    """Texts that follow each other as one, thoughts as ("", text), calls as (name, arguments)."""
    said: Said = []
    parts = [*(part for pieces in pushed for part in reader.push(pieces)), *reader.finish()]
    for part in join_parts(parts):
        last = said[-1] if said else None
        if isinstance(part, tuple):
            said.append((part[0], read_arguments(part[1])))
        elif isinstance(part, Thought):
            before = said.pop()[1] if isinstance(last, tuple) and last[0] == "" else ""
            said.append(("", before + part.text))
        else:
            said.append(part)
    return said


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [case[1:] for case in OUTPUTS],
    ids=[case[0] for case in OUTPUTS],
)
def test_the_parts_of_an_answer(reader: Callable[[], Reader], text: str, expected: Said) -> None:
    pieces = cut(reader(), text)
    assert read(reader(), [pieces]) == expected
    assert read(reader(), [[piece] for piece in pieces]) == expected
    for cut_at in range(len(pieces)):
        assert read(reader(), [pieces[:cut_at], pieces[cut_at:]]) == expected


@given(case=st.sampled_from(OUTPUTS), cuts=st.lists(st.integers(0, 200)))
def test_cutting_changes_nothing(
    case: tuple[str, Callable[[], Reader], str, Said], cuts: list[int]
) -> None:
    _, reader, text, expected = case
    pieces = cut(reader(), text)
    at = sorted({min(place, len(pieces)) for place in cuts} | {0, len(pieces)})
    assert read(reader(), [pieces[start:end] for start, end in pairwise(at)]) == expected


HARMONY = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "assistant"]
HARMONY += ["analysis", "final", "to=functions.look ", "json", "{}", " ", "to", "?!", "x " * 130]


@given(st.lists(st.sampled_from(HARMONY), max_size=12), st.lists(st.integers(0, 400)))
@example(["to=functions.look ", "<|message|>", "{}", "x " * 130], [60, 61, 62, 63, 64, 65, 66])
def test_of_a_text_that_does_not_follow_the_form_nothing_is_lost(
    parts: list[str], cuts: list[int]
) -> None:
    pieces = cut(CHANNELS(), "".join(parts))
    at = sorted({min(place, len(pieces)) for place in cuts} | {0, len(pieces)})
    whole = read(CHANNELS(), [pieces])
    assert read(CHANNELS(), [pieces[start:end] for start, end in pairwise(at)]) == whole
    # No name of a channel, a kind or a function is of such characters.
    said = "".join(part if isinstance(part, str) else str(part[1]) for part in whole)
    assert said.count("?!") == parts.count("?!")


def test_thoughts_are_not_held_back_longer_than_they_may_end() -> None:
    reader = thinks()()
    assert list(reader.push(["<think>\nI am"])) == [Thought("I am")]
    assert reader.thinking
    assert list(reader.push([" not </th"])) == [Thought(" not")]
    assert list(reader.push(["us</think>\n"])) == [Thought(" </thus")]
    assert not reader.thinking
    assert list(reader.push(["\nYes"])) == ["Yes"]


@pytest.mark.parametrize("form", [LIST, NAMED])
def test_mistrals_ids_have_nine_letters(form: ToolFormat) -> None:
    text = f"[TOOL_CALLS][{LOOK}]" if form is LIST else "[TOOL_CALLS]look[ARGS]{}"
    reader = calls(form)()
    call, *_ = [*reader.push([text]), *reader.finish()]
    assert isinstance(call, Call)
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_arguments_on_a_channel_come_as_they_are_written() -> None:
    reader = CHANNELS()
    assert not list(reader.push(cut(reader, TO)))
    call, piece = reader.push(['{"a": "b'])
    assert isinstance(call, Call)
    assert (call.name, piece) == ("get_current_weather", ArgumentText('{"a": "b', last=False))
    assert list(reader.push([' c"}'])) == [ArgumentText(' c"}', last=True)]
    assert reader.called
