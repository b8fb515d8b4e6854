"""An estimate of a grid's duration, from the time of one passage."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tangram.lab.accuracy.engines import ModelBench
from tangram.lab.accuracy.forced import ForcedText
from tangram.lab.accuracy.methods import Method
from tangram.lab.accuracy.passages import TAIL_TOKENS, Passages
from tangram.lab.accuracy.run import PlannedCell

# the time of a generated token, in prompt tokens; replies end halfway to their limit
_DECODE_TOKENS, _REPLY_SHARE = 8, 0.5


def minutes(bench: ModelBench, plans: Sequence[PlannedCell]) -> float:
    """The estimated time of `plans`: their tokens, at the speed of one chunk computed now."""
    config = Method("full").config(bench.base)
    tokens = [
        (7 * place) % bench.loaded.geometry.vocab_size
        for place in range(config.chunk_tokens + TAIL_TOKENS)
    ]
    forced = ForcedText(config, bench.loaded)
    forced.logits(tokens)  # compiles
    begin = time.perf_counter()
    forced.logits(tokens)
    pace = (time.perf_counter() - begin) / len(tokens)
    return sum(_prompt_tokens(plan) for plan in plans) * pace / 60


def _prompt_tokens(plan: PlannedCell) -> float:
    """The number of prompt tokens that would take the same time."""
    if isinstance(plan.prompts, Passages):
        return plan.prompts.count * plan.prompts.longest_tokens
    again = plan.method.name in ("dynamic", "one-shot")  # each question computes its context
    return sum(
        sample.shared_tokens * (len(sample.prompts) if again else 1)
        + sum(len(prompt) - sample.shared_tokens for prompt in sample.prompts)
        + _DECODE_TOKENS
        * _REPLY_SHARE
        * sum(question.max_tokens for question in sample.sample.questions)
        for sample in plan.prompts.samples
    )
