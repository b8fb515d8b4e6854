"""What tests of the suites share: a tokenizer of a few lines, and every task of every made-up
suite.
"""

from __future__ import annotations

import re

from tangram_lab.accuracy import multiturn, ruler
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.sample import Sample, write_sample

TASKS = [("ruler", task) for task in ruler.TASKS] + [
    ("multiturn", task) for task in multiturn.TASKS
]

_PIECE = re.compile(r"\w{1,5}|[^\w\s]|\n")


def count_tokens(text: str) -> int:
    """Words in pieces of five letters, signs and line ends: about what a real tokenizer makes of
    English.
    """
    return len(_PIECE.findall(text))


def sample(
    suite: str, task: str, context_tokens: int = 1_500, number: int = 0, seed: int = 0
) -> Sample:
    known = {"ruler": ruler.TASKS, "multiturn": multiturn.TASKS}[suite]
    return write_sample(
        suite, task, known[task], Budget(count_tokens, context_tokens), seed, number
    )
