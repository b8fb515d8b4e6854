"""Calls, thoughts and schemas of each family of models, end to end: its tokenizer, its chat
template, and a model that says what such a model says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.real_templates import ERNIE, MISTRAL_LISTS, real_template
from tests.real_tokenizers import add_tokenizer
from tests.recorded_calls import cut_down_template

from .conftest import CHAT, MODEL, chat_body, join_calls, stream_data
from .scripted import ScriptedServer, run_scripted_server
from .tiny import tiny_folder

LOOK = '{"name": "look", "arguments": {"city": "Rome"}}'
HERMES = f"<tool_call>\n{LOOK}\n</tool_call>"
TAGS = (
    "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)
THOUGHT = "<think>\nHm.\n</think>\n\n"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
STOP = '{"name": "stop", "arguments": {}}'
ON_CHANNEL = "<|channel|>{}<|message|>{}<|end|><|start|>assistant"


@dataclass(frozen=True)
class TokenizerFamily:
    """A tokenizer and a template, and how such a model writes.

    `several` has a second call, of `stop`. `before` says "I look." before a call, `answer` and
    `ended` are around an answer without one, `thought` says "Hm." Where `ordinary`, ordinary tokens
    may spell the marks where a call must be.
    """

    tokenizer: str
    template: str
    call: str
    several: str = ""
    before: str = "I look.\n"
    answer: str = ""
    ended: str = ""
    thought: str = ""
    ordinary: bool = True


BOTH = f"{HERMES}\n<tool_call>\n{STOP}\n</tool_call>"
AFTER_NAME = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
FAMILIES = {
    "Qwen2.5": TokenizerFamily("qwen2_5", real_template("qwen2_5"), HERMES, BOTH),
    "Qwen3": TokenizerFamily("qwen3", real_template("qwen3"), HERMES, BOTH, thought=THOUGHT),
    # Qwen3-Coder has Qwen3's tokens. Here the prompt opens the thought.
    "tags": TokenizerFamily(
        "qwen3", real_template("qwen3_5_think"), TAGS, thought=THOUGHT.removeprefix("<think>\n")
    ),
    "Llama 3.1": TokenizerFamily(
        "llama3_1", real_template("llama3_1"), LOOK.replace("arguments", "parameters"), before=""
    ),
    "Mistral": TokenizerFamily(
        "mistral_v3",
        MISTRAL_LISTS["mistral-7b-instruct-v0.3"],
        f"[TOOL_CALLS] [{LOOK}]",
        f"[TOOL_CALLS] [{LOOK}, {STOP}]",
        ordinary=False,
    ),
    # Its own template shows no tools.
    "DeepSeek": TokenizerFamily(
        "deepseek_v3",
        cut_down_template("deepseek_v31"),
        f"<｜tool▁calls▁begin｜>{AFTER_NAME}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{AFTER_NAME}"
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        before="I look.",
    ),
    # With the tokens of V3, which spell the mark of V3.2.
    "DeepSeek V3.2": TokenizerFamily(
        "deepseek_v3",
        real_template("deepseek-v3.2"),
        DSML,
        DSML.replace(
            "\n</｜DSML｜f", '\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜f'
        ),
        before="I look.\n\n",
    ),
    # No package has the tokenizers of these models: another spells their marks.
    "ERNIE 4.5": TokenizerFamily(
        "llama2",
        ERNIE,
        f"\n{HERMES}\n",
        f"\n{BOTH}\n",
        before="<response>\nI look.\n</response>\n",
        answer="<response>\n",
        ended="\n</response>\n",
        thought="Hm.\n</think>\n\n",
    ),
    "Nemotron Nano v2": TokenizerFamily(
        "qwen2_5",
        cut_down_template("nemotron_v2"),
        f"<TOOLCALL>[{LOOK}]</TOOLCALL>",
        f"<TOOLCALL>[{LOOK}, {STOP}]</TOOLCALL>",
    ),
    "Apriel": TokenizerFamily(
        "qwen2_5",
        real_template("apriel-1.6-15b-thinker"),
        f"\n<tool_calls>[{LOOK}]</tool_calls>",
        f"\n<tool_calls>[{LOOK}, {STOP}]</tool_calls>",
        ended="\n[END FINAL RESPONSE]",
        thought="Hm.\n[BEGIN FINAL RESPONSE]\n",
    ),
    "Apertus": TokenizerFamily(
        "qwen2_5",
        real_template("apertus-8b-instruct"),
        '<|tools_prefix|>[{"look": {"city": "Rome"}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"look": {"city": "Rome"}}, {"stop": {}}]<|tools_suffix|>',
        before="I look.",
    ),
    "GigaChat 3": TokenizerFamily(
        "qwen2_5",
        real_template("gigachat3-10b-a1.8b"),
        f"function call<|role_sep|>\n{LOOK}",
        f"function call<|role_sep|>\n{LOOK}function call<|role_sep|>\n{STOP}",
    ),
    "GPT-OSS": TokenizerFamily(
        "gptoss",
        real_template("gptoss"),
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}',
        before=ON_CHANNEL.format("commentary", "I look."),
        answer="<|channel|>final<|message|>",
        thought=ON_CHANNEL.format("analysis", "Hm."),
        ordinary=False,
    ),
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "stop"}}
NAMED = {"type": "function", "function": {"name": "look"}}


@dataclass(frozen=True)
class ServedFamily:
    family: TokenizerFamily
    server: ScriptedServer

    @property
    def tokenizer(self) -> Any:
        return self.server.engine.codec.tokenizer

    def ordinary(self, text: str) -> list[int]:
        """`text` in ordinary tokens only."""
        backend = self.tokenizer.backend_tokenizer
        plain = Tokenizer(backend.model)
        plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        tokens: list[int] = plain.encode(text).ids
        return tokens

    def whole(self, text: str) -> list[int]:
        """`text` in the tokens that it has after a control token, marks as theirs."""
        after = f"{self.tokenizer.eos_token}{text}"
        tokens: list[int] = self.tokenizer.encode(after, add_special_tokens=False)[1:]
        return tokens

    def ask(self, tokens: list[int], **fields: Any) -> list[dict[str, Any]]:
        """What comes back, in one piece and as a stream, of a model that wants to say `tokens`."""
        body = chat_body(**({"temperature": 0, "max_tokens": 200} | fields))
        with self.server.http() as http:
            self.server.say(tokens)
            whole = http.post(CHAT, json=body).json()
            assert "choices" in whole, whole
            self.server.say(tokens)
            with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
                *chunks, end = stream_data(response)
        assert end == "[DONE]"
        (choice,) = whole["choices"]
        message = choice["message"]
        deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
        pieces = [piece for each in deltas for piece in each["delta"].get("tool_calls", [])]
        return [
            {
                "thought": message.get("reasoning_content") or "",
                "content": (message["content"] or "").strip(),
                "calls": [call["function"] for call in message.get("tool_calls", [])],
                "reason": choice["finish_reason"],
            },
            {
                "thought": "".join(d["delta"].get("reasoning_content") or "" for d in deltas),
                "content": "".join(d["delta"].get("content") or "" for d in deltas).strip(),
                "calls": [call["function"] for call in join_calls(pieces)],
                "reason": deltas[-1]["finish_reason"],
            },
        ]


def expect(*calls: dict[str, Any], thought: str = "", content: str = "") -> dict[str, Any]:
    reason = "tool_calls" if calls else "stop"
    return {"thought": thought, "content": content, "calls": list(calls), "reason": reason}


ROME = {"name": "look", "arguments": '{"city": "Rome"}'}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedFamily]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    add_tokenizer(family.tokenizer, folder)
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    numbers = [*description["model"]["vocab"].values()]
    vocabulary = 1 + max(*numbers, *(token["id"] for token in description["added_tokens"]))
    tiny_folder(folder, vocabulary=vocabulary)
    (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    with run_scripted_server(folder, vocabulary) as server:
        yield ServedFamily(family, server)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call_in_the_tokens_of_the_model(served: ServedFamily, choice: Any) -> None:
    family = served.family
    fields = {"tools": [TOOL, OTHER], "tool_choice": choice}
    for thought in {family.thought, "" if not family.thought.startswith("Hm.") else family.thought}:
        said = "Hm." if thought else ""
        tokens = served.whole(thought + family.call)
        for found in served.ask(tokens, **fields):
            assert found == expect(ROME, thought=said)
        if choice == "auto" and family.before:
            tokens = served.whole(thought + family.before + family.call)
            for found in served.ask(tokens, **fields):
                assert found == expect(ROME, thought=said, content="I look.")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_marks_that_ordinary_tokens_spell(served: ServedFamily, choice: str) -> None:
    family = served.family
    if family.answer or (choice == "required" and not family.ordinary):
        pytest.skip("the form has the tokens only")
    before = family.before if choice == "auto" else ""
    tokens = served.ordinary(family.thought + before + family.call)
    assert not set(tokens) & set(served.tokenizer.added_tokens_encoder.values())
    for found in served.ask(tokens, tools=[TOOL, OTHER], tool_choice=choice):
        thought, content = "Hm." if family.thought else "", "I look." if before else ""
        assert found == expect(ROME, thought=thought, content=content)


def test_several_calls(served: ServedFamily) -> None:
    family = served.family
    if not family.several:
        pytest.skip("this form has one call, or the cases above have what it has besides")
    for choice in ("auto", "required"):
        tokens = served.whole(f"{family.thought}{family.several}")
        thought = "Hm." if family.thought else ""
        for found in served.ask(tokens, tools=[TOOL, OTHER], tool_choice=choice):
            assert found == expect(ROME, {"name": "stop", "arguments": "{}"}, thought=thought)


def test_a_thought_and_an_answer_without_a_call(served: ServedFamily) -> None:
    family = served.family
    said = f"{family.thought}{family.answer}No need, 2 < 3.{family.ended}"
    thought = "Hm." if family.thought else ""
    for fields in ({"tools": [TOOL]}, {}):
        for found in served.ask(served.whole(said), **fields):
            assert found == expect(thought=thought, content="No need, 2 < 3.")


def test_a_schema_and_a_thought_before_it(served: ServedFamily) -> None:
    family = served.family
    schema = {"name": "a", "schema": PARAMETERS}
    said = f'{family.thought}{family.answer}{{"city": "Rome"}}{family.ended}'
    for tools in ({"tools": [TOOL]}, {}):
        fields = {"response_format": {"type": "json_schema", "json_schema": schema}, **tools}
        for found in served.ask(served.whole(said), **fields):
            thought = "Hm." if family.thought else ""
            assert found == expect(thought=thought, content='{"city": "Rome"}')


def test_what_a_thought_says_of_calls_is_a_thought(served: ServedFamily) -> None:
    family = served.family
    if not family.thought:
        pytest.skip("such a model does not think")
    thought = family.thought.replace("Hm.", "First <tool_call> and then x.")
    tokens = served.whole(thought + family.call)
    for found in served.ask(tokens, tools=[TOOL], tool_choice="auto"):
        assert found == expect(ROME, thought="First <tool_call> and then x.")


def test_values_that_name_marks_stay_as_they_are(served: ServedFamily) -> None:
    family, marks = served.family, served.server.engine.codec.marks
    names = [*marks.names.values(), *marks.words.values()]
    if not names:
        pytest.skip("this family has no marks")
    value = f"a {' b '.join(names)} c"
    before, after = family.call.split("Rome")
    spelled = served.ordinary(value)
    call = [*served.whole(family.thought + before), *spelled, *served.whole(after)]
    for choice in ("auto", "required"):
        for found in served.ask(call, tools=[TOOL], tool_choice=choice):
            (called,) = found["calls"]
            assert json.loads(called["arguments"])["city"].strip() == value
            assert found["reason"] == "tool_calls"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    begun = served.whole(f'{family.thought}{family.answer}{{"city": "')
    for tools in ({"tools": [TOOL]}, {}):
        answer = [*begun, *spelled, *served.whole(f'"}}{family.ended}')]
        for found in served.ask(answer, response_format=schema, **tools):
            assert json.loads(found["content"])["city"].strip() == value


def test_streams_have_no_line_end_of_unicode(served: ServedFamily) -> None:
    said = "a\u2028b\x85c\u2029d"
    tokens = served.whole(f"{served.family.thought}{served.family.answer}{said}")
    for found in served.ask(tokens):  # httpx takes these for ends of lines
        assert found["content"] == said
    body = {"model": MODEL, "input": "a", "stream": True, "temperature": 0}
    served.server.say(tokens)
    with served.server.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line[:6] == "data: "]
    deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    assert "".join(deltas).strip() == said
