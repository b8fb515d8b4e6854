"""What a model may write when it may call tools: texts that can end there, and texts that cannot
come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from tangram.engine.text.formats import TOOL_FORMATS
from tangram.engine.text.grammar import GrammarCompiler
from tangram.serve.bodies.structured import Tool
from tangram.serve.formats.call_grammar import CallGrammar
from tangram.serve.formats.forms import AnswerForm
from tangram.types import ToolFormat

END = 2
HERMES = TOOL_FORMATS["hermes"]
LLAMA = TOOL_FORMATS["llama3"]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in (("look", CITY), ("stop", None))
]
YES = {"enum": ["yes"]}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
LOOK_L, STOP_L = (
    '{"name": "look", "parameters": {"city": "Oslo"}}',
    '{"name": "stop", "parameters": {}}',
)
WRONG = [
    '<tool_call>\n{"name": "fly',
    '<tool_call>{"name"',
    '<tool_call>\n{"name": "look", "arguments": {"city": "Paris',
    '<tool_call>\n{"name": "look", "arguments": {}',
    '<tool_call>\n{"name": "stop", "arguments": {"a"',
]


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=len(tokenizer), end_token_ids=[END])


def may_end(compiler: GrammarCompiler, grammar: CallGrammar, tokens: list[int]) -> bool | None:
    """Whether an answer of `tokens` may end there; None if it cannot come so far."""
    matcher = compiler.compile(grammar.source(), "tools").begin()
    for token in tokens:
        if not np.unpackbits(matcher.mask_tokens(), bitorder="little")[token]:
            return None
        matcher.take(token)
        assert matcher.error is None
    return bool(np.unpackbits(matcher.mask_tokens(), bitorder="little")[END])


def wish(
    form: ToolFormat, *, forced: bool, parallel: bool = True, schema: dict[str, Any] | None = None
) -> CallGrammar:
    return CallGrammar(TOOLS, form, forced, parallel, schema, AnswerForm(control_token_ids=[5, 6]))


FREE, ONE = wish(HERMES, forced=False), wish(HERMES, forced=False, parallel=False)
MUST, MUST_ONE = wish(HERMES, forced=True), wish(HERMES, forced=True, parallel=False)
EITHER = wish(HERMES, forced=False, schema=YES)
FREE_L, MUST_L, EITHER_L = (
    wish(LLAMA, forced=False),
    wish(LLAMA, forced=True),
    wish(LLAMA, forced=False, schema=YES),
)
WISHES = {
    "free": FREE,
    "one": ONE,
    "must": MUST,
    "must one": MUST_ONE,
    "either": EITHER,
    "free llama": FREE_L,
    "must llama": MUST_L,
    "either llama": EITHER_L,
}
GOOD = {
    "free": [
        "",
        "Hello {",
        "a < b",
        "<tool",
        LOOK,
        f"I look.\n{LOOK}\n{STOP}",
        f"{LOOK} and {LOOK} done",
    ],
    "one": ["", "Hello", LOOK, f"I look. {STOP}"],
    "must": [LOOK, f"{LOOK}\n{STOP}\n{LOOK}"],
    "must one": [LOOK, STOP],
    "either": ['"yes"', LOOK, f"{LOOK}\n{LOOK}"],
    "free llama": ["", "Hello", '{"age": 3}', '{"na', LOOK_L, STOP_L],
    "must llama": [LOOK_L, STOP_L],
    "either llama": ['"yes"', LOOK_L],
}
UNFINISHED = {
    "free": "<tool_call>",
    "one": "<tool_call>\n",
    "must": "",
    "either": '"',
    "free llama": '{"name": "',
    "must llama": "",
}
BAD = {
    "free": [*WRONG, *(f"Well. {text}" for text in WRONG)],
    "one": [*WRONG, f"{LOOK}\n{STOP}"],
    "must": [*WRONG, "Hello", f"{LOOK} and"],
    "must one": [*WRONG, f"{LOOK}\n"],
    "either": [*WRONG, "Hello", '"no', f"{LOOK}x"],
    "free llama": ['{"name": "fly', f"{STOP_L} "],
    "must llama": ["H", f"{STOP_L}\n"],
    "either llama": ["H"],
}


@pytest.mark.parametrize("wished", GOOD)
def test_what_may_be_said(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, wished: str
) -> None:
    for text in GOOD[wished]:
        assert may_end(
            compiler, WISHES[wished], tokenizer.encode(text, add_special_tokens=False)
        ), text


@pytest.mark.parametrize("wished", UNFINISHED)
def test_what_cannot_end_there(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, wished: str
) -> None:
    tokens = tokenizer.encode(UNFINISHED[wished], add_special_tokens=False)
    assert may_end(compiler, WISHES[wished], tokens) is False


@pytest.mark.parametrize("wished", BAD)
def test_what_cannot_be_said(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, wished: str
) -> None:
    for text in BAD[wished]:
        assert (
            may_end(compiler, WISHES[wished], tokenizer.encode(text, add_special_tokens=False))
            is None
        ), text


def test_control_tokens_stand_in_free_text_only(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    hello, call = (tokenizer.encode(text, add_special_tokens=False) for text in ("Hello", LOOK))
    assert may_end(compiler, FREE, [5, *hello, 6, *call, 5])
    assert may_end(compiler, FREE_L, [5, *hello])
    assert may_end(compiler, FREE, [*hello, 7]) is None
    assert may_end(compiler, FREE, [*call[:8], 5]) is None
    assert may_end(compiler, MUST, [5]) is None
