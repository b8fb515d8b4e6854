"""How much an evaluation computes, in prompt tokens: for its progress and its estimated time."""

from __future__ import annotations

from tangram_lab.accuracy.passages import Passages
from tangram_lab.accuracy.sample import Question
from tangram_lab.accuracy.sample_prompts import SamplePrompts, SuitePrompts

# The time of a generated token, in prompt tokens; replies end halfway to their limit.
_DECODE_TOKENS, _REPLY_SHARE = 8, 0.5


def count_work(prompts: SuitePrompts | Passages) -> int:
    """The work of answering or reading them."""
    if isinstance(prompts, Passages):
        return prompts.count * prompts.longest_tokens
    return sum(
        count_prompt_work(sample, place) + count_reply_work(question)
        for sample in prompts.samples
        for place, question in enumerate(sample.sample.questions)
    )


def count_prompt_work(sample: SamplePrompts, place: int) -> int:
    """The work of the prompt of question `place`: the first one computes the context for all."""
    tokens = len(sample.prompts[place])
    return tokens if place == 0 else tokens - sample.shared_tokens


def count_reply_work(question: Question, generated: int | None = None) -> int:
    """The work of a reply so far, at most what is expected of all; None counts all."""
    expected = int(_DECODE_TOKENS * _REPLY_SHARE * question.max_tokens)
    return expected if generated is None else min(_DECODE_TOKENS * generated, expected)
