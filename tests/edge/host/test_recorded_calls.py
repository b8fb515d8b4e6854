"""Every format of calls, on recorded answers: streamed they say what they say as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tangram.engine.text.formats import TOOL_FORMATS
from tangram.serve.calls import Call, CallReader
from tests.recorded_calls import ARGUMENTS, CITY, RECORDED, Part, read_parts

SCHEMAS = {
    "look": {"type": "object", "properties": {"city": {"type": "string"}, "deep": {}}},
    "stop": {"type": "object"},
}
CALLS = [("look", ARGUMENTS), ("stop", {})]


def read(name: str, pieces: Sequence[str]) -> list[Part]:
    return read_parts(CallReader(TOOL_FORMATS[name], SCHEMAS.keys(), SCHEMAS), pieces)


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
def test_what_is_cut_off_or_names_no_function_stays_text(name: str) -> None:
    form, calls = TOOL_FORMATS[name], RECORDED[name].calls
    unknown = calls.replace("look", "fly").replace("stop", "run")
    assert read(name, [unknown]) == [unknown]
    if form.end:
        cut = calls[: calls.index(CITY[:3]) + 3]
        assert read(name, list(cut)) == [cut]


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
    "inside", ["city=[" * 5000, "city='a", "city=a", "city", "'a'", "city=1 2", "city=}"]
)
def test_what_is_no_call_of_python_stays_text(inside: str) -> None:
    calls = f"<|tool_call_start|>[look({inside})]<|tool_call_end|>"
    assert read("lfm2", [calls]) == [calls]


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


@pytest.mark.parametrize("name", ["mistral", "command", "phi4_mini", "granite", "functools"])
def test_a_call_may_come_without_the_list_around_it(name: str) -> None:
    form = TOOL_FORMATS[name]
    call = form.call.replace("$name", "look").replace("$arguments", '{"city": "Rome"}')
    assert read(name, [f"{form.begin}{call}{form.end}"]) == [("look", {"city": "Rome"})]
    assert read(name, [f"{form.begin}7{form.end}"]) == [f"{form.begin}7{form.end}"]
