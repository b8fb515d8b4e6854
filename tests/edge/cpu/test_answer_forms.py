"""How models mark thoughts and write calls, told from the chat templates that they ship with."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.text.answer_text import TextStream, spell
from tangram.engine.text.codec import TextCodec
from tangram.engine.text.formats import TOOL_FORMATS
from tangram.engine.text.grammar import GrammarCompiler
from tangram.errors import RequestError
from tangram.model import embedded
from tangram.serve.bodies.structured import Tool
from tangram.serve.formats.call_grammar import CallGrammar, answer_grammar
from tangram.serve.formats.forms import AnswerForm
from tangram.types import CallStyle
from tests.mentions import mentioning
from tests.real_templates import MISTRAL_LISTS, MISTRAL_NAMED, real_template

USER = {"role": "user", "content": "Weather?"}
THINK, CHANNELS = "<think>", "<|channel|>analysis<|message|>"
FORMS = {
    "qwen2_5": (CallStyle.OBJECT, None),
    "qwen3": (CallStyle.OBJECT, THINK),
    "qwen3_instruct_2507": (CallStyle.OBJECT, None),
    "qwen3_5_think": (CallStyle.TAGGED, THINK),
    "nemotron_3_nano": (CallStyle.TAGGED, THINK),
    "llama3": (None, None),
    "llama3_1": (CallStyle.OBJECT, None),
    "llama3_2": (CallStyle.OBJECT, None),
    "deepseek_r1_distill": (None, THINK),
    "gptoss": (CallStyle.CHANNEL, CHANNELS),
    "gemma3": (None, None),
}
# Control tokens of GPT-OSS and Mistral.
CONTROLS = {
    "gptoss": [
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}


def codec_of(template: str, controls: list[str] | None = None) -> TextCodec:
    """The embedded model's tokenizer with a template, and more control tokens."""
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = template
    tokenizer.add_tokens(
        [AddedToken(name, special=True) for name in controls or []], special_tokens=True
    )
    return TextCodec(tokenizer)


@pytest.fixture(scope="module")
def gptoss() -> TextCodec:
    return codec_of(real_template("gptoss"), CONTROLS["gptoss"])


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_told_from_the_real_template(name: str) -> None:
    codec = codec_of(real_template(name))
    tools, thinking = codec.tool_format, codec.thinking_format
    assert (tools and tools.style, thinking and thinking.begin) == FORMS[name]


def test_forms_of_mistral_and_of_the_embedded_model() -> None:
    lists = [(template, CallStyle.OBJECT) for template in MISTRAL_LISTS.values()]
    for template, style in (*lists, (MISTRAL_NAMED, CallStyle.NAMED)):
        codec = codec_of(template, CONTROLS["mistral"])
        assert codec.tool_format is not None
        assert codec.tool_format.style is style
        assert codec.thinking_format is None
        assert "[TOOL_CALLS]" in codec.marks.names.values()
    plain = TextCodec(load_tokenizer("smollm2"))
    assert (plain.tool_format, plain.thinking_format, plain.marks.names) == (None, None, {})


@pytest.mark.parametrize(
    ("name", "options", "opened"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen3_5_think", {}, True),
        ("qwen3_5_think", {"enable_thinking": False}, False),
        ("deepseek_r1_distill", {}, True),
    ],
)
def test_whether_the_prompt_opens_the_thought(
    name: str, options: dict[str, Any], opened: bool
) -> None:
    codec = codec_of(real_template(name))
    sly = {"role": "user", "content": "Say <think>"}
    for message in (USER, sly):
        prompt = codec.chat_prompt([message], (), options)
        assert AnswerForm.of(codec).after(codec, prompt).opened is opened


def test_past_thoughts_go_where_templates_want_them(gptoss: TextCodec) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    turn = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I must look.",
        "tool_calls": [call],
    }
    history = [USER, turn, {"role": "tool", "tool_call_id": "call00000", "content": "sunny"}]
    for codec, shown in (
        (codec_of(real_template("qwen3")), "<think>\nI must look.\n</think>"),
        (gptoss, f"{CHANNELS}I must look.<|end|>"),
    ):
        assert shown in codec.verbatim(codec.chat_prompt(history), "messages")
    # What is long past, Qwen3 forgets.
    past = [USER, {"role": "assistant", "content": "Sun.", "reasoning_content": "Hm."}, USER]
    codec = codec_of(real_template("qwen3"))
    assert "Hm." not in codec.verbatim(codec.chat_prompt(past), "messages")


def test_what_the_template_of_gpt_oss_has_no_space_for(gptoss: TextCodec) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    turn = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    form = AnswerForm.of(gptoss)
    shown = gptoss.verbatim(
        gptoss.chat_prompt([USER, form.adapt_message(turn, "messages[1]")]), "messages"
    )
    assert f"{CHANNELS}Hm.\nI look.<|end|>" in shown
    with pytest.raises(RequestError, match=mentioning("messages[1].tool_calls 2 one")) as caught:
        form.adapt_message(turn | {"tool_calls": [call, call]}, "messages[1]")
    assert caught.value.field == "messages[1].tool_calls"


def test_marks_stand_in_the_text_and_stop_strings_are_not_looked_for_in_heads(
    gptoss: TextCodec,
) -> None:
    said = "<|channel|>final<|message|>The final word.<|end|>"
    tokens = gptoss.tokenizer.encode(said, add_special_tokens=False)

    def text(stop: list[str]) -> str:
        stream, found = TextStream(gptoss, stop=stop, marks=gptoss.marks), ""
        for token in tokens:
            found += spell(stream.push([token]))
            if stream.stopped:
                return found
        return found + spell(stream.finish())

    assert text([]) == said
    assert text(["final"]) == "<|channel|>final<|message|>The "
    assert text(["<|message|>"]) == said
    bare = TextStream(gptoss)
    assert spell([*bare.push(tokens), *bare.finish()]) == "finalThe final word."


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in (("look", CITY), ("stop", None))
]
ROME = '{"city": "Rome"}'
TAGGED = (
    "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n"
    "{}</function>\n</tool_call>"
)
UNIT = "<parameter=unit>\nC\n</parameter>\n"
WRONG_UNIT, DAYS = UNIT.replace("C", "K"), "<parameter=days>\n3\n</parameter>\n"
FINAL = "<|channel|>final<|message|>"
AGAIN = "<|end|><|start|>assistant"
ASIDE = f"<|channel|>analysis<|message|>Hm.{AGAIN}"
TO = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
LATER = " to=functions.stop<|channel|>commentary json<|message|>"
# Where the answer must be a call, where it may be one, and where it is one or the word "yes".
GOOD = {
    "list": (
        [f'[TOOL_CALLS][{{"name": "look", "arguments": {ROME}}}]'],
        ["", "I look.", "[TOOL_CALLS"],
    ),
    "named": (
        [
            f"[TOOL_CALLS]look[ARGS]{ROME}",
            f"[TOOL_CALLS]look[ARGS]{ROME}[TOOL_CALLS]stop[ARGS]{{}}",
        ],
        ["", "Hi"],
    ),
    "tagged": (
        [TAGGED.format(""), TAGGED.format(UNIT), TAGGED.format(UNIT + DAYS)],
        ["", "Hi <tool"],
    ),
    "channels": (
        [TO + ROME, ASIDE + TO + ROME, f"{LATER}{{}}"],
        [f"{FINAL}Hi", f"{ASIDE}{FINAL}Hi"],
    ),
    "thinking": (
        [f"<think>\nHm.\n</think>\n\n{TAGGED.format('')}", TAGGED.format("")],
        ["", "<think>Hm.</think>Hi"],
    ),
    "opened": ([f"Hm.\n</think>\n\n{TAGGED.format('')}"], ["Hm.</think>Hi"]),
}
BAD = {
    "list": ['[TOOL_CALLS][{"name": "fly"', "[TOOL_CALLS] x"],
    "named": ["[TOOL_CALLS]fly", '[TOOL_CALLS]look[ARGS]{"town"'],
    "tagged": [
        TAGGED.format(WRONG_UNIT),
        TAGGED.format(DAYS.replace("3", "x")),
        "<tool_call>\n<function=fly>",
    ],
    "channels": [TO.replace("look", "fly"), f'{TO}{{"town"'],
    "thinking": ["<think>Hm.</think><tool_call>\n<function=fly>"],
    "opened": [f"Hm.</think>{TAGGED.format(WRONG_UNIT)}"],
}
YES = {"enum": ["yes"]}
SHAPED = {
    "thinking": '<think>Hm.</think>\n"yes"',
    "opened": 'Hm.</think>"yes"',
    "channels": f'{ASIDE}{FINAL}"yes"',
}


@pytest.fixture(scope="module")
def forms(gptoss: TextCodec) -> dict[str, tuple[TextCodec, AnswerForm]]:
    found = {"channels": (gptoss, AnswerForm.of(gptoss))}
    for name, template in (
        ("list", MISTRAL_LISTS["mistral-nemo-instruct-2407"]),
        ("named", MISTRAL_NAMED),
    ):
        codec = codec_of(template, CONTROLS["mistral"])
        found[name] = codec, AnswerForm.of(codec)
    qwen = codec_of(real_template("qwen3_5_think"))
    form = AnswerForm.of(qwen)
    found["opened"] = qwen, form.after(qwen, qwen.chat_prompt([USER]))
    found["thinking"] = qwen, form
    found["tagged"] = qwen, AnswerForm(form.tools)
    return found


@functools.cache
def compiler_of(codec: TextCodec) -> GrammarCompiler:
    """It reads a whole vocabulary, so one serves all tests of a tokenizer."""
    ends = [codec.tokenizer.eos_token_id]
    return GrammarCompiler(codec.tokenizer, vocab_size=len(codec.tokenizer), end_token_ids=ends)


def may_end(codec: TextCodec, source: str, text: str) -> bool | None:
    """Whether an answer of `text` may end there; None if it cannot come so far."""
    end = codec.tokenizer.eos_token_id
    matcher = compiler_of(codec).compile(source, "tools").begin()
    for token in codec.tokenizer.encode(text, add_special_tokens=False):
        if not np.unpackbits(matcher.mask_tokens(), bitorder="little")[token]:
            return None
        matcher.take(token)
    return bool(np.unpackbits(matcher.mask_tokens(), bitorder="little")[end])


@pytest.mark.parametrize("name", GOOD)
def test_grammars_follow_the_form(
    name: str, forms: dict[str, tuple[TextCodec, AnswerForm]]
) -> None:
    codec, form = forms[name]
    assert form.tools is not None
    called, free = GOOD[name]
    must, may = (
        CallGrammar(TOOLS, form.tools, forced, True, None, form).source()
        for forced in (True, False)
    )
    for text in called:
        assert may_end(codec, must, text), text
        assert may_end(codec, may, text), text
    for text in free:
        assert may_end(codec, may, text), text
        assert not may_end(codec, must, text), text
    for text in BAD[name]:
        assert may_end(codec, must, text) is None, text
    either = CallGrammar(TOOLS, form.tools, False, True, YES, form).source()
    assert may_end(codec, either, called[0])
    if name in SHAPED:
        assert may_end(codec, either, SHAPED[name])
        assert may_end(codec, answer_grammar(YES, form), SHAPED[name])
        assert not may_end(codec, answer_grammar(YES, form), called[0])


def test_what_bare_text_cannot_be_held_to_is_refused_where_it_must_hold(
    forms: dict[str, tuple[TextCodec, AnswerForm]],
) -> None:
    codec, form = forms["tagged"]
    assert form.tools is not None
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^R"}}}
    tools = [
        Tool.model_validate(
            {"type": "function", "function": {"name": "look", "parameters": schema}}
        )
    ]
    with pytest.raises(
        RequestError,
        match=mentioning("tools[0].function.parameters.properties.city.pattern 'pattern'"),
    ) as caught:
        CallGrammar(tools, form.tools, True, True, None, form).source()
    assert caught.value.field == "tools[0].function.parameters.properties.city.pattern"
    free = CallGrammar(tools, form.tools, False, True, None, form).source()
    assert may_end(codec, free, TAGGED.format(""))


def test_the_embedded_models_template_adds_tools_and_changes_nothing_else() -> None:
    own = load_tokenizer("smollm2")
    ours = copy.deepcopy(own)
    ours.chat_template = embedded.TEMPLATE
    system, answer = {"role": "system", "content": "Be brief. "}, {"role": "assistant"}
    turn = [USER, answer | {"content": " yes\n"}, USER]
    for messages in ([USER], turn, [system, *turn], [system], [*turn, system, USER]):
        for opened in (True, False):
            rendered = [
                one.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
                for one in (own, ours)
            ]
            assert rendered[0] == rendered[1]
    assert TextCodec(own).tool_format is None
    assert TextCodec(ours).tool_format == TOOL_FORMATS["hermes"]
    assert not TextCodec(ours).template_options, "it reads no variables, as before"
