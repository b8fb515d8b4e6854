"""Every format of calls, on recorded answers: streamed they say what they say as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.engine.text.formats import TOOL_FORMATS, split_argument, split_shape
from tangram.serve.formats.calls import ArgumentText, Call, CallReader
from tests.recorded_calls import ARGUMENTS, CITY, RECORDED, Part, join_parts, read_parts

SCHEMAS = {
    "look": {"type": "object", "properties": {"city": {"type": "string"}, "deep": {}}},
    "stop": {"type": "object"},
}
CALLS = [("look", ARGUMENTS), ("stop", {})]


def make_reader(name: str) -> CallReader:
    return CallReader(TOOL_FORMATS[name], SCHEMAS.keys(), SCHEMAS)


def read(name: str, pieces: Sequence[str]) -> list[Part]:
    return read_parts(make_reader(name), pieces)


def test_every_format_has_a_recorded_answer() -> None:
    # Harmony's answers are messages, with tests of their own.
    assert RECORDED.keys() == TOOL_FORMATS.keys() - {"harmony"}


@pytest.mark.parametrize("name", RECORDED)
def test_streamed_answers_are_whole_answers_at_every_cut(name: str) -> None:
    form, calls = TOOL_FORMATS[name], RECORDED[name].calls
    text, expected = calls, list(CALLS)
    if form.begin:
        text, expected = f"I look. \n{calls}", ["I look.", *CALLS]
    if form.end:
        text, expected = f"{text} Done <", [*expected, " Done <"]
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected
    for cut in range(len(text)):
        assert read(name, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", RECORDED)
def test_calls_of_no_function_stay_text(name: str) -> None:
    unknown = RECORDED[name].calls.replace("look", "fly").replace("stop", "run")
    assert read(name, [unknown]) == [unknown]
    assert read(name, list(unknown)) == [unknown]


@pytest.mark.parametrize("name", RECORDED)
def test_of_an_answer_that_ends_anywhere_stays_what_came(name: str) -> None:
    calls = RECORDED[name].calls
    _, whole = zip(*join_parts(make_reader(name).push([calls])), strict=True)
    seen = set()
    for cut in range(len(calls)):
        reader = make_reader(name)
        parts = [*reader.push(list(calls[:cut])), *reader.finish()]
        said = join_parts(parts)
        again = make_reader(name)
        assert join_parts([*again.push([calls[:cut]]), *again.finish()]) == said
        given = [part[1] for part in said if isinstance(part, tuple)]
        assert all(text.startswith(part) for text, part in zip(whole, given, strict=False))
        ended = [part.last for part in parts if isinstance(part, ArgumentText) and part.last]
        assert reader.called == again.called == (0 < len(given) == len(ended))
        seen.add(len(given))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("name", RECORDED)
def test_a_text_comes_as_it_is_written(name: str) -> None:
    before, after = RECORDED[name].calls.split("more", 1)
    reader = make_reader(name)
    assert sum(isinstance(part, Call) for part in reader.push([before])) == 1
    for word in ("one ", "two", ",", " three <", "(4)"):
        pieces = list(reader.push([word, " "]))
        assert "".join(piece.text for piece in pieces).strip() == word.strip()
    rest = join_parts([Call("look"), *reader.push([after]), *reader.finish()])
    assert rest[0][1].startswith('", "deep": ')


FRAGMENTS = [
    '"',
    "'",
    "\\",
    "\\u",
    "d83d",
    "\\ude00",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "1",
]
FRAGMENTS += ["\n", " ", "null", "tr", "text", "look", "stop", "city", "deep", '{"city": "', '": "']


@st.composite
def broken_calls(draw: st.DrawFn) -> tuple[str, str, list[int]]:
    """A format, an answer that is nearly one of it, and places to cut it."""
    name = draw(st.sampled_from(list(RECORDED)))
    calls, form = RECORDED[name].calls, TOOL_FORMATS[name]
    marks = [form.begin, form.end, form.quote, *split_shape(form.call)[::2]]
    marks += split_shape(form.argument)[::2]
    text = draw(st.sampled_from([calls, calls[: len(calls) // 2], form.begin, ""]))
    for said in draw(st.lists(st.sampled_from([*FRAGMENTS, *filter(None, marks)]), max_size=12)):
        at = draw(st.integers(0, len(text)))
        text = f"{text[:at]}{said}{text[at:]}"
    return name, text, draw(st.lists(st.integers(0, len(text)), max_size=8))


@given(broken_calls())
def test_no_cut_changes_what_is_read(case: tuple[str, str, list[int]]) -> None:
    name, text, cuts = case
    at = sorted({0, *cuts, len(text)})
    streams = [text], list(text), [text[start:end] for start, end in pairwise(at)]
    said = []
    for pieces in streams:
        reader = make_reader(name)
        parts = [*(part for piece in pieces for part in reader.push([piece])), *reader.finish()]
        said.append((join_parts(parts), reader.called))
    assert said[0] == said[1] == said[2]
    for part in said[0][0]:
        str(part).encode()  # clients take UTF-8


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.end])
def test_an_argument_may_say_the_marks(name: str) -> None:
    form = TOOL_FORMATS[name]
    if name == "harmony":
        return
    said = f"{form.begin.strip()} or {form.end.strip()}"
    calls = RECORDED[name].calls.replace("é", said)
    deep = {**ARGUMENTS["deep"], "text": f"{said}, ]}}) '"}
    assert read(name, list(calls)) == [("look", {"city": CITY, "deep": deep}), ("stop", {})]


def test_kimis_calls_have_the_ids_that_they_are_written_with() -> None:
    reader = CallReader(TOOL_FORMATS["kimi_k2"], SCHEMAS.keys())
    said = [*reader.push([RECORDED["kimi_k2"].calls]), *reader.finish()]
    assert [call.id for call in said if isinstance(call, Call)] == [
        "functions.look:0",
        "functions.stop:1",
    ]


@pytest.mark.parametrize("text", ["'it\\'s'", '"it\'s"', '"it\\u0027s"', "'it\\x27s'"])
def test_texts_of_python_are_read_as_python_reads_them(text: str) -> None:
    calls = f"<|tool_call_start|>[look(city={text}, deep=None)]<|tool_call_end|>"
    assert read("lfm2", [calls]) == [("look", {"city": "it's", "deep": None})]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("city=" + "[" * 5000, '{"city": ' + "[" * 63),
        ("city='a", '{"city": "a)]<|tool_call_end|>'),
        ("city=a", '{"city": '),
        ("city", '{"city"'),
        ("'a'", '{"a"'),
        ("city=1 2", '{"city": 1'),
        ("city=}", '{"city": '),
        (f"city={'1' * 5000}", '{"city": '),
    ],
)
def test_what_is_no_python_ends_the_arguments(inside: str, arguments: str) -> None:
    reader = make_reader("lfm2")
    calls = f"<|tool_call_start|>[look({inside})]<|tool_call_end|>"
    said = join_parts([*reader.push(calls), *reader.finish()])
    assert said[0] == ("look", arguments)
    assert not reader.called


@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        *((name, "\\ud83d\\ude00\\ud83d!", "\U0001f600\ufffd!") for name in ("lfm2", "hermes")),
        *((name, "\\\\ud83d\\ude00", "\\ud83d\ufffd") for name in ("lfm2", "hermes")),
    ],
)
def test_half_a_surrogate_pair_is_replaced(name: str, said: str, text: str) -> None:
    calls = RECORDED[name].calls.replace("and \\\\ more", said)
    for pieces in ([calls], list(calls)):
        (_, first), _ = read(name, pieces)
        assert first["city"] == f'São "Paulo"\n{text}'


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("{'list': [1, None, True], 'text': \"it's\"}", {"list": [1, None, True], "text": "it's"}),
        ("['a', {'b': -2.5}]", ["a", {"b": -2.5}]),
        ("None", None),
        ("'a'", "'a'"),
        ("{'a': 1} and more", "{'a': 1} and more"),
        ("{'a': " * 5000, "{'a': " * 5000),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
    ],
)
@pytest.mark.parametrize("name", ["seed_oss", "qwen3_coder", "glm45"])
def test_a_bare_value_may_be_written_as_python_does(name: str, said: str, value: object) -> None:
    deep = json.dumps(ARGUMENTS["deep"], ensure_ascii=False)
    calls = RECORDED[name].calls.replace(deep, said)
    assert read(name, [calls]) == [("look", {"city": CITY, "deep": value}), ("stop", {})]


@pytest.mark.parametrize(
    ("key", "is_text", "said", "value"),
    [
        ("deep", "true", "3", "3"),
        ("deep", "false", "3", 3),
        ("city", "false", "3", 3),
        ("deep", "false", '"3"', "3"),
        ("deep", "false", "no JSON", "no JSON"),
    ],
)
def test_a_tag_says_whether_its_value_is_a_text(
    key: str, is_text: str, said: str, value: object
) -> None:
    name = "deepseek_v32"
    form = TOOL_FORMATS[name]
    opening, middle, end = split_argument(form, is_text=is_text == "true")
    given = f"{opening}{key}{middle}{said}{end}"
    call = form.call.replace("$name", "look").replace("$arguments", given)
    text = f"{form.begin}{call}{form.end}"
    assert read(name, list(text)) == read(name, [text])
    assert read(name, [text]) == [("look", {key: value})]


@pytest.mark.parametrize(
    "name", ["mistral", "command", "phi4_mini", "granite", "functools", "nemotron_v2", "apriel"]
)
def test_a_call_may_come_without_the_list_around_it(name: str) -> None:
    form = TOOL_FORMATS[name]
    call = form.call.replace("$name", "look").replace("$arguments", '{"city": "Rome"}')
    assert read(name, [f"{form.begin}{call}{form.end}"]) == [("look", {"city": "Rome"})]
    assert read(name, [f"{form.begin}7{form.end}"]) == [f"{form.begin}7{form.end}"]
