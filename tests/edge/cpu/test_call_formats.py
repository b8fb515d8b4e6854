"""Formats of calls, told from templates; and the grammar of each, which its row makes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.config import CHOICES
from tangram.engine.text.codec import TextCodec
from tangram.engine.text.formats import THINKING_FORMATS, TOOL_FORMATS, split_argument
from tangram.engine.text.tools import find_written_format, marks
from tangram.errors import ConfigError, RequestError
from tangram.model.chat_template import read_template
from tangram.serve.bodies.structured import CustomTool, Tool
from tangram.serve.formats.call_grammar import UNESCAPED, CallGrammar
from tangram.serve.formats.forms import AnswerForm
from tangram.types import CallStyle, ToolFormat
from tests.mentions import mentioning
from tests.real_templates import ERNIE, MISTRAL_LISTS, real_template
from tests.recorded_calls import CUT_DOWN, RECORDED, cut_down_template, join_parts

from .test_answer_forms import codec_of, compiler_of, may_end

REAL = {
    "qwen3": "hermes",
    "qwen3_6": "qwen3_coder",
    "glm4moe": "glm45",
    "lfm2": "lfm2",
    "lfm2_v2": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "gemma4_v2": "gemma4",
    "gemma4_v5": "gemma4",
    "gptoss": "harmony",
    "llama3_2": "llama3",
    "apertus-8b-instruct": "apertus",
    "apriel-1.6-15b-thinker": "apriel",
    "deepseek-v3.2": "deepseek_v32",
    "gigachat3-10b-a1.8b": "gigachat3",
}
_ANY = (
    '<minimax:tool_call>\n<invoke name="go">\n<parameter name="to">a</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
_ANSWER = {"role": "assistant", "content": "Sun."}
NAMES = [name for name in RECORDED if TOOL_FORMATS[name].begin]
CONTROLS = [
    *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>"),
    *("<|/tool_call|>", "<|tool_call_start|>", '<|"|>', "<|tool_call>", "<tool_call|>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<|tools_prefix|>", "<|tools_suffix|>", "<|role_sep|>"),
    *("<|function_call|>", "｜DSML｜", "<tool_calls>", "</tool_calls>"),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
]
DEEP = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"type": ["integer", "null", "boolean"]}},
        "text": {"type": "string"},
        "more": {"type": "number"},
    },
    "required": ["list", "text"],
    "additionalProperties": False,
}
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "deep": DEEP,
        "free": {},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = [tool("look", LOOK), tool("stop", None)]


def bare(form: ToolFormat | None) -> ToolFormat | None:
    """`form` without what it has of a template."""
    if form is None:
        return None
    spaces = {"begin": form.begin.strip(), "end": form.end.strip()}
    return replace(form, text_arguments=False, described=False, **spaces)


@pytest.fixture(scope="module", params=["tokens", "text"])
def codec(request: pytest.FixtureRequest) -> Iterator[TextCodec]:
    """A tokenizer of which marks are control tokens, and one that spells them."""
    yield codec_of("", CONTROLS if request.param == "tokens" else [])


def grammar(codec: TextCodec, name: str, tools: list[Tool], *, forced: bool) -> str:
    form = TOOL_FORMATS[name]
    answer = AnswerForm(form, marks=marks(codec.tokenizer, form, None))
    return CallGrammar(tools, form, forced, True, None, answer).source()


@pytest.mark.parametrize("name", REAL)
def test_the_format_is_told_from_the_real_template(name: str) -> None:
    assert bare(codec_of(real_template(name)).tool_format) == bare(TOOL_FORMATS[REAL[name]])


@pytest.mark.parametrize(
    ("name", "described"), [("apertus-8b-instruct", True), ("gptoss", True), ("qwen3", False)]
)
def test_a_template_that_takes_no_tool_without_a_description_is_told(
    name: str, described: bool
) -> None:
    form = codec_of(real_template(name)).tool_format
    assert form is not None
    assert form.described is described


def test_a_line_break_after_a_call_calls_no_more(codec: TextCodec) -> None:
    source = grammar(codec, "hermes", TOOLS, forced=True)
    assert may_end(codec, source, f"{RECORDED['hermes'].calls}\n")


@pytest.mark.parametrize("template", MISTRAL_LISTS.values(), ids=MISTRAL_LISTS)
def test_mistrals_lists_are_told(template: str) -> None:
    assert bare(codec_of(template).tool_format) == bare(TOOL_FORMATS["mistral"])


@pytest.mark.parametrize("name", CUT_DOWN)
def test_the_format_is_told_from_a_cut_down_template(name: str) -> None:
    codec = codec_of(cut_down_template(name))
    assert bare(codec.tool_format) == bare(TOOL_FORMATS[name])
    assert codec.tool_format is not None
    assert codec.tool_format.text_arguments == (name == "deepseek_v31")


@pytest.mark.parametrize(
    ("name", "begin", "calls"),
    [
        ("lfm2", "List of tools: [", ""),
        ("lfm2", "List of tools: <|tool_list_start|>[", ""),
        ("pythonic", "", '[{{ f.name }}(key="{{ f.arguments.key }}")]'),
    ],
)
def test_the_format_is_told_where_templates_write_past_calls_badly_or_not(
    name: str, begin: str, calls: str
) -> None:
    codec = codec_of(
        f"{{%- if tools %}}{begin}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}"
        "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{calls}{{% endfor %}}{{% endfor %}}"
    )
    assert bare(codec.tool_format) == TOOL_FORMATS[name]


@pytest.mark.parametrize("named", ["auto", "mistral"])
def test_templates_that_take_thoughts_as_blocks_get_them_so(named: str) -> None:
    codec = codec_of(
        "{%- for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for b in m.content %}{% if b.type == 'thinking' %}[THINK]{{ b.thinking }}"
        "[/THINK]{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    codec = TextCodec(codec.tokenizer, thinking_format=named)
    assert codec.thinking_format == replace(THINKING_FORMATS["mistral"], blocks=True)
    form = AnswerForm.of(codec)
    turn = {"role": "assistant", "content": "Sun.", "reasoning_content": "Hm."}
    for message, shown in ((turn, "[THINK]Hm.[/THINK]Sun."), (_ANSWER, "Sun.")):
        text = "".join(codec.render_chat([form.adapt_message(message, "messages[0]")]))
        assert text == f"<assistant>{shown}"


def test_templates_that_remove_all_but_the_last_thought_tell_its_marks() -> None:
    codec = codec_of(
        "{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ m.content if loop.index0 == ns.last else m.content.split('</think>')[-1] }}"
        "{% endfor %}"
    )
    assert codec.thinking_format == THINKING_FORMATS["think"]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_must_come_is_written_as_recorded(codec: TextCodec, name: str) -> None:
    source, calls = grammar(codec, name, TOOLS, forced=True), RECORDED[name].calls
    assert may_end(codec, source, calls)
    assert may_end(codec, source, f"I look. {calls}") is None
    for wrong in (calls.replace("look", "fly"), calls.replace("city", "town")):
        assert may_end(codec, source, wrong) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_call_may_come_after_text(codec: TextCodec, name: str) -> None:
    source, calls = grammar(codec, name, TOOLS, forced=False), RECORDED[name].calls
    for text in ("", "I look.", calls, f"I look. {calls}"):
        assert may_end(codec, source, text), text
    assert may_end(codec, source, f"I look. {calls.replace('look', 'fly')}") is None


def test_deepseeks_template_writes_calls_and_shows_no_tools() -> None:
    codec = codec_of(real_template("deepseekv3"))
    assert codec.tool_format is None
    written = find_written_format(codec.template, TOOL_FORMATS, "")
    assert bare(written) == bare(TOOL_FORMATS["deepseek_v3"])
    assert written is not None
    assert written.text_arguments


def test_past_arguments_are_text_where_the_template_adds_them_to_text() -> None:
    codec = codec_of(cut_down_template("deepseek_v31"))
    function = {"name": "look", "arguments": {"city": "Ró"}}
    call = {"id": "a", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    shown = codec.render_chat([AnswerForm.of(codec).adapt_message(turn, "messages[0]")])
    assert '<｜tool▁sep｜>{"city": "Ró"}<｜tool▁call▁end｜>' in "".join(shown)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("glm4moe", "think"),
        ("gemma4_v5", "gemma4"),
        ("gemma4", "gemma4"),
        ("lfm2_2_5", "think"),
        ("lfm2_v2", None),
        ("gptoss", "harmony"),
        ("apriel-1.6-15b-thinker", "apriel"),
        ("deepseek-v3.2", "think"),
        ("gigachat3-10b-a1.8b", None),
        ("command", "command"),
        ("seed_oss", "seed_oss"),
    ],
)
def test_marks_of_thoughts_are_told_from_the_template(template: str, name: str | None) -> None:
    if template in CUT_DOWN:
        marked = THINKING_FORMATS[template]
        text = cut_down_template(template)
        shown = f"{marked.begin}{{{{ m.reasoning_content }}}}{marked.end}{{{{ m.content }}}}"
        source = text.replace("{{ m.content }}", shown)
    else:
        source = real_template(template)
    expected = None if name is None else THINKING_FORMATS[name]
    assert codec_of(source).thinking_format == expected


@pytest.mark.parametrize("past", ["", "reasoning_content"])
def test_marks_around_answers_are_told_from_the_template(past: str) -> None:
    codec = codec_of(ERNIE.replace("reasoning_content", past or "thought"))
    assert codec.thinking_format == THINKING_FORMATS["ernie"]
    assert bare(codec.tool_format) == bare(TOOL_FORMATS["hermes"])


def test_a_named_format_holds_where_the_template_shows_another_or_none() -> None:
    tokenizer = codec_of(real_template("qwen3")).tokenizer
    codec = TextCodec(tokenizer, tool_format="olmo3", thinking_format="seed_oss")
    assert codec.tool_format == TOOL_FORMATS["olmo3"]
    assert codec.thinking_format == THINKING_FORMATS["seed_oss"]
    named = TextCodec(tokenizer, tool_format="hermes")
    assert named.tool_format == codec_of(real_template("qwen3")).tool_format
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert TextCodec(tokenizer, tool_format="hermes").tool_format is None, "it shows no tools"


def test_the_options_name_every_format() -> None:
    assert set(CHOICES["tool_format"]) == {"auto", *TOOL_FORMATS}
    assert set(CHOICES["thinking_format"]) == {"auto", *THINKING_FORMATS}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "^R"}, ".pattern"),
        ({"type": "array", "items": {"type": "string", "maxLength": 3}}, ".items.maxLength"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, ".additionalProperties"),
    ],
)
def test_what_values_between_marks_cannot_be_held_to_is_refused_where_it_must_hold(
    codec: TextCodec, schema: dict[str, Any], place: str
) -> None:
    parameters = {"type": "object", "properties": {"city": schema}, "required": ["city"]}
    where = f"tools[0].function.parameters.properties.city{place}"
    with pytest.raises(RequestError, match=mentioning(where)):
        grammar(codec, "gemma4", [tool("look", parameters)], forced=True)
    assert grammar(codec, "gemma4", [tool("look", parameters)], forced=False)


def test_values_between_marks_follow_their_schema(codec: TextCodec) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}]}}}
    free = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/node"}},
        "$defs": {"node": node},
    }
    source = grammar(codec, "gemma4", [tool("go", free)], forced=False)
    for said in ("{}", '{to:{next:{next:<|"|>a<|"|>,b:[1,-2.5]}}}'):
        assert may_end(codec, source, f"<|tool_call>call:go{said}<tool_call|>"), said
    source = grammar(codec, "gemma4", TOOLS, forced=True)
    city = 'city:<|"|>a<|"|>'
    for said in (city, f'{city},unit:<|"|>C<|"|>', f"{city},free:[{{a:null}}]"):
        assert may_end(codec, source, f"<|tool_call>call:look{{{said}}}<tool_call|>"), said
    for said in (
        "",
        'unit:<|"|>C<|"|>',
        f'{city},unit:<|"|>K',
        f"{city},deep:{{list:[1.5",
        "city:1",
    ):
        assert may_end(codec, source, f"<|tool_call>call:look{{{said}}}<tool_call|>") is None, said


def test_arguments_of_python_follow_their_schema(codec: TextCodec) -> None:
    source = grammar(codec, "lfm2", TOOLS, forced=True)
    for said in ('city="a"', 'city="a", unit="C"', 'city="a", free=[null]'):
        assert may_end(codec, source, f"<|tool_call_start|>[look({said})]<|tool_call_end|>"), said
    for said in ("", 'unit="C"', 'city="a", unit="K"', "city=1"):
        assert (
            may_end(codec, source, f"<|tool_call_start|>[look({said})]<|tool_call_end|>") is None
        ), said


def test_a_template_that_a_user_gives_is_read_within_bounds(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    for content, fault in (
        (None, "cannot be read"),
        (b"", "empty"),
        (b"\xff", "UTF-8"),
        (b"a" * (2**20 + 1), "1048576 bytes"),
    ):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=mentioning(f"chat_template chat.jinja {fault}")):
            read_template(str(file))
    file.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template(str(file)) == "{{ 'é' }}"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gemma4", '<|tool_call>call:go{to:<|"|>a<|"|>,n:[1]}<tool_call|>'),
        ("lfm2", '<|tool_call_start|>[go(to="a", n=[1])]<|tool_call_end|>'),
        ("minimax_m2", _ANY),
    ],
)
def test_a_schema_without_properties_allows_any(codec: TextCodec, name: str, call: str) -> None:
    tools = [tool("go", {"type": "object"})]
    assert may_end(codec, grammar(codec, name, tools, forced=False), call)
    answer = AnswerForm(TOOL_FORMATS[name], marks=marks(codec.tokenizer, TOOL_FORMATS[name], None))
    alone = CallGrammar(tools, TOOL_FORMATS[name], True, False, None, answer)
    assert compiler_of(codec).compile(alone.describe_arguments(), "tools")


# What Codex sends for its tool `apply_patch`.
PATCHES = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = (
    '*** Begin Patch\n*** Update File: a.py\n@@ def f("x"):\n-  </a>\n+  {é}\\n\n*** End Patch\n'
)


def custom(syntax: str, definition: str) -> Tool:
    grammar = {"syntax": syntax, "definition": definition}
    named = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
    return Tool.of(CustomTool.model_validate({"type": "custom", "custom": named}))


def write_input(form: ToolFormat, text: str) -> str:
    """A call of `patch` as a model writes it."""
    given = json.dumps({"input": text}, ensure_ascii=False)
    if form.argument:
        quoted = f"{form.quote}{text}{form.quote}"
        if form.style is CallStyle.PYTHON:
            quoted = json.dumps(text, ensure_ascii=False)
        opening, middle, end = split_argument(form, is_text=True)
        given = f"{opening}input{middle}{quoted}{end}"
    opening, closing = form.brackets or ("", "")
    call = form.call.replace("$name", "patch").replace("$index", "0").replace("$callid", "")
    return f"{form.begin}{opening}{call.replace('$arguments', given)}{closing}{form.end}"


def read_input(form: ToolFormat, pieces: Iterable[str]) -> str:
    reader = AnswerForm(form).reader([custom("regex", "a")])()
    parts = [*(part for piece in pieces for part in reader.push([piece])), *reader.finish()]
    assert reader.called
    ((name, text),) = join_parts(parts)
    assert name == "patch"
    return str(text)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if TOOL_FORMATS[name].style in UNESCAPED])
def test_an_input_follows_its_grammar_where_texts_are_not_escaped(
    codec: TextCodec, name: str, forced: bool
) -> None:
    form, tools = TOOL_FORMATS[name], [custom("lark", PATCHES), *TOOLS]
    source, said = grammar(codec, name, tools, forced=forced), write_input(form, PATCH)
    assert may_end(codec, source, said)
    assert may_end(codec, source, RECORDED[name].calls)
    assert read_input(form, [said]) == read_input(form, said) == PATCH
    for wrong in ("*** Begin", "Update File: a.py", "*** End"):
        assert may_end(codec, source, said.replace(wrong, "a")) is None


@pytest.mark.parametrize("name", NAMES)
def test_an_input_follows_an_expression_in_every_format(codec: TextCodec, name: str) -> None:
    form = TOOL_FORMATS[name]
    source = grammar(codec, name, [custom("regex", 'a/"é\\n(b|c)+')], forced=True)
    said = write_input(form, 'a/"é\nbcb')
    assert may_end(codec, source, said)
    assert read_input(form, [said]) == read_input(form, said) == 'a/"é\nbcb'
    assert may_end(codec, source, write_input(form, 'a/"é\nd')) is None
