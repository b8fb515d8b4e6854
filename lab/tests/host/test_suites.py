"""What every made-up suite promises: length, determinism, answers and evidence in the context, an
even spread.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.host.asking import TASKS, count_tokens, sample
from tangram.errors import ConfigError
from tangram_lab.accuracy.grading import occurs, score_reply
from tangram_lab.accuracy.sample import Question, Sample
from tangram_lab.accuracy.suites import MIN_CONTEXT_TOKENS, SUITES

MADE_UP = [name for name in SUITES if name != "locomo"]


def gold(question: Question) -> str:
    return ", ".join(question.answers)


@pytest.mark.parametrize("context_tokens", [MIN_CONTEXT_TOKENS, 2_047, 9_000])
@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_contexts_are_never_too_long_and_nearly_full(
    suite: str, task: str, context_tokens: int
) -> None:
    """Within 5 %; where a piece of the text is longer than that, within a piece (a pair of UUIDs is
    30 tokens here).
    """
    for number in range(2):
        length = count_tokens(sample(suite, task, context_tokens, number).context)
        assert length <= context_tokens
        assert length >= min(0.95 * context_tokens, context_tokens - 75)


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_the_same_four_things_give_the_same_sample_and_others_another(
    suite: str, task: str
) -> None:
    first = sample(suite, task, 800)
    assert sample(suite, task, 800) == first
    others = [
        sample(suite, task, 801),
        sample(suite, task, 800, number=1),
        sample(suite, task, 800, seed=1),
    ]
    assert all(other.questions != first.questions for other in others)


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_a_question_can_follow_the_context(suite: str, task: str) -> None:
    made = sample(suite, task)
    assert made.context.endswith("\n")
    assert all(question.text and not question.text[0].isspace() for question in made.questions)


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_right_replies_get_1_and_unrelated_ones_0(suite: str, task: str) -> None:
    for question in sample(suite, task).questions:
        assert score_reply(question, gold(question)) == 1
        assert score_reply(question, "I am sorry, I do not know.") == 0
        assert score_reply(question, "") == 0


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_the_answer_to_another_question_is_wrong(suite: str, task: str) -> None:
    made, other = sample(suite, task, number=0), sample(suite, task, number=1)
    for question in made.questions:
        wrong = [
            one
            for one in (*made.questions, *other.questions)
            if not set(one.answers) & set(question.answers)
        ]
        assert wrong
        assert all(score_reply(question, gold(one)) == 0 for one in wrong)


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_answers_and_evidence_are_in_the_context(suite: str, task: str) -> None:
    made = sample(suite, task)
    for question in made.questions:
        assert all(occurs(answer, made.context) for answer in question.answers)
        assert all(made.context.count(piece) == 1 for piece in question.evidence)
        assert task in ("cwe", "fwe") or all(
            any(answer in piece for piece in question.evidence) for answer in question.answers
        )


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_a_reply_may_be_as_long_as_the_answer(suite: str, task: str) -> None:
    """Tokenizers for code and digits make one token of every two characters at worst."""
    for question in sample(suite, task).questions:
        assert question.max_tokens >= len(gold(question)) / 2


def test_another_process_writes_the_same_samples() -> None:
    program = (
        "import hashlib, sys; from tangram_lab.accuracy.suites import SUITES\n"
        "made = [SUITES[name](len, 3000, 18, 7) for name in ('ruler', 'multiturn')]\n"
        "sys.stdout.write(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program], capture_output=True, check=True, text=True
    )
    made = [SUITES[name](len, 3_000, 18, 7) for name in MADE_UP]
    assert run.stdout == hashlib.sha256(repr(made).encode()).hexdigest()


@pytest.mark.parametrize("name", MADE_UP)
def test_samples_are_spread_evenly_over_tasks(name: str) -> None:
    made = SUITES[name](count_tokens, 600, 50)
    counts = Counter(one.task for one in made)
    assert sum(counts.values()) == 50
    assert set(counts) == {task for suite, task in TASKS if suite == name}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len({(one.task, one.number) for one in made}) == 50
    assert SUITES[name](count_tokens, 600, 7) == made[:7]


def test_ruler_has_thirteen_tasks() -> None:
    assert len({one.task for one in SUITES["ruler"](count_tokens, 600, 13)}) == 13


def test_tasks_and_questions_can_be_picked() -> None:
    made = SUITES["multiturn"](
        count_tokens, 600, 5, tasks=["report", "key_values"], max_questions=2
    )
    assert [one.task for one in made] == ["report", "key_values", "report", "key_values", "report"]
    assert all(len(one.questions) == 2 for one in made)
    whole = SUITES["multiturn"](count_tokens, 600, 1, tasks=["report"])
    assert made[0].questions == whole[0].questions[:2]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: SUITES["ruler"](count_tokens, 100, 5), "context_tokens is 100, .*512"),
        (lambda: SUITES["ruler"](count_tokens, 600, 0), "samples is 0, .*1"),
        (lambda: SUITES["ruler"](count_tokens, 600, 5, max_questions=0), "max_questions is 0, .*1"),
        (lambda: SUITES["ruler"](count_tokens, 600, 5, tasks=[]), "tasks is empty.*niah_single_1"),
        (
            lambda: SUITES["ruler"](count_tokens, 600, 5, tasks=["niah"]),
            "tasks has 'niah'.*niah_single_1",
        ),
        (lambda: SUITES["ruler"](count_tokens, 600, 5, path=Path("x.json")), "path is x.json"),
        (lambda: SUITES["locomo"](count_tokens, 600, 5), "path is missing"),
    ],
)
def test_impossible_arguments_are_refused_by_name(
    call: Callable[[], list[Sample]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        call()
