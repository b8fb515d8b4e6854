"""Prompts: the context of a sample is one prefix, which ends where it should, and nothing of it is
lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.tests.host.asking import sample
from lab.tests.host.test_locomo import document, make_question
from tangram.errors import ConfigError
from tangram_lab.accuracy.sample_prompts import (
    Alignment,
    Questions,
    filler_token,
    parse_suites,
    prompts_of,
)
from tests.mentions import mentioning

BOS, USER, END, ASSISTANT = 1, 2, 3, 4


class CharacterTokenizer:
    """A token a character, and pairs of line ends as one, in a template of a few tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        return BOS, *self._tokens(text)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return BOS, USER, *self._tokens("\n" + messages[0]["content"]), END, ASSISTANT

    def text(self, tokens: Sequence[int]) -> str:
        return "".join("\n\n" if token == 5 else chr(token - 10) for token in tokens if token > 4)

    def _tokens(self, text: str) -> list[int]:
        return [
            5 if pair == "\n\n" else ord(character) + 10
            for pair in _pairs(text)
            for character in pair[:1]
        ]


def _pairs(text: str) -> list[str]:
    found: list[str] = []
    for character in text:
        if found and found[-1] == character == "\n":
            found[-1] = "\n\n"
        else:
            found.append(character)
    return found


CODEC = CharacterTokenizer()
SAMPLE = sample("ruler", "niah_multikey_1", 600)


def test_without_alignment_a_prompt_is_what_the_chat_template_makes() -> None:
    made = prompts_of(SAMPLE, CODEC, None)
    for prompt, question in zip(made.prompts, SAMPLE.questions, strict=True):
        assert prompt == CODEC.chat_prompt(
            [{"role": "user", "content": SAMPLE.context + question.text}]
        )
    assert made.filler_tokens == 0 and len(made.prompts) == 4


@pytest.mark.parametrize("tokens", [1, 7, 64, 512, 8192])
def test_the_shared_part_is_the_context_and_ends_at_a_multiple(tokens: int) -> None:
    made = prompts_of(SAMPLE, CODEC, Alignment(tokens, filler_token(CODEC)))
    first = made.prompts[0][: made.shared_tokens]
    assert made.shared_tokens % tokens == 0 and made.filler_tokens < tokens
    assert all(prompt[: made.shared_tokens] == first for prompt in made.prompts)
    assert CODEC.text(first).lstrip("\n") == SAMPLE.context
    for prompt, question in zip(made.prompts, SAMPLE.questions, strict=True):
        assert CODEC.text(prompt[made.shared_tokens :]) == question.text
        assert prompt[-2:] == (END, ASSISTANT)


def test_filler_comes_after_the_template_and_before_the_context() -> None:
    whole, filled = prompts_of(SAMPLE, CODEC, None), prompts_of(SAMPLE, CODEC, Alignment(512, 9))
    head = filled.prompts[0].index(9)
    assert head == 3, "template and its line end"
    assert filled.prompts[0][head : head + filled.filler_tokens] == (9,) * filled.filler_tokens
    for prompt, plain in zip(filled.prompts, whole.prompts, strict=True):
        assert (*prompt[:head], *prompt[head + filled.filler_tokens :]) == plain


def test_a_single_question_does_not_count_as_shared() -> None:
    one = sample("ruler", "niah_single_1", 600)
    made = prompts_of(one, CODEC, None)
    assert CODEC.text(made.prompts[0][made.shared_tokens :]) == one.questions[0].text


def test_contexts_with_the_template_keep_within_what_was_asked_for() -> None:
    questions = Questions("multiturn", ("key_values", "report"), 4, 2048)
    made = questions.prompts(CODEC, Alignment(512, filler_token(CODEC)))
    assert all(one.shared_tokens == 2048 for one in made.samples)
    assert all(one.filler_tokens < 0.08 * 2048 for one in made.samples)
    assert made.sha256 == questions.prompts(CODEC, Alignment(512, filler_token(CODEC))).sha256
    assert made.sha256 != questions.prompts(CODEC, None).sha256


def test_conversations_are_filled_up_to_the_next_chunk_only(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text(
        json.dumps(document(make_question(2, "D1:1"), make_question(4, "D5:2")))
    )
    questions = Questions("locomo", None, 1, 6_000, path=tmp_path)
    (one,) = questions.prompts(CODEC, Alignment(512, filler_token(CODEC))).samples
    assert one.shared_tokens % 512 == 0 and one.filler_tokens < 512 and one.shared_tokens < 6_000


def test_a_context_that_the_template_fills_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("context_tokens 512 3 519")):
        Questions("ruler", None, 1, 512).prompts(CODEC, None)


def test_suites_and_tasks_are_named() -> None:
    assert parse_suites("ruler, multiturn") == {"ruler": None, "multiturn": None}
    found = parse_suites("ruler/vt,multiturn/report,ruler/cwe")
    assert found == {"ruler": ("vt", "cwe"), "multiturn": ("report",)}
    assert parse_suites("ruler/vt,ruler") == parse_suites("ruler,ruler/vt") == {"ruler": None}
    with pytest.raises(ConfigError, match=mentioning("suites 'rular' ruler multiturn locomo")):
        parse_suites("rular")
