"""Grades: right replies get 1, unrelated ones 0, and parts of words or numbers count
for nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_lab.accuracy.grading import RULES, occurs, score_reply, token_f1
from tangram_lab.accuracy.sample import Grade, Question

WORD = st.text(alphabet="bcdfghjklm", min_size=2, max_size=8)
PHRASE = st.lists(WORD, min_size=1, max_size=4).map(" ".join)
UNRELATED = st.lists(st.text(alphabet="nopqrst", min_size=2, max_size=8), max_size=8).map(" ".join)


def question(grade: Grade, *answers: str) -> Question:
    return Question("What?", answers, grade, 10)


@given(grade=st.sampled_from(sorted(RULES)), answer=PHRASE)
def test_the_answer_itself_is_right_in_any_case(grade: Grade, answer: str) -> None:
    asked = question(grade, answer)
    assert score_reply(asked, answer) == 1
    assert score_reply(asked, f"  {answer.upper()}.\n") == 1


@given(
    grade=st.sampled_from(sorted(RULES)),
    answers=st.lists(PHRASE, min_size=1, max_size=3),
    reply=UNRELATED,
)
def test_an_unrelated_reply_is_worth_nothing(grade: Grade, answers: list[str], reply: str) -> None:
    assert score_reply(question(grade, *answers), reply) == 0


@given(
    grade=st.sampled_from(sorted(RULES)),
    answers=st.lists(st.text(min_size=1), min_size=1),
    reply=st.text(),
)
def test_any_texts_have_a_score_from_0_to_1(grade: Grade, answers: list[str], reply: str) -> None:
    assert 0 <= score_reply(question(grade, *answers), reply) <= 1


@given(answers=st.lists(WORD, min_size=1, max_size=6, unique=True), data=st.data())
def test_all_is_the_share_of_answers_that_occur(answers: list[str], data: st.DataObject) -> None:
    said = data.draw(st.lists(st.sampled_from(answers), unique=True))
    assert score_reply(question("all", *answers), "They are " + ", ".join(said)) == pytest.approx(
        len(said) / len(answers)
    )
    assert score_reply(question("any", *answers), "They are " + ", ".join(said)) == bool(said)


@given(number=st.integers(0, 10**7), digit=st.integers(0, 9))
def test_numbers_match_whole(number: int, digit: int) -> None:
    assert occurs(str(number), f"it is {number}, I think")
    assert occurs(str(number), f"({number}).")
    for longer in (
        f"{number}{digit}",
        f"{digit}{number}",
        f"{number}.{digit}",
        f"{digit}.{number}",
    ):
        assert not occurs(str(number), longer)


@pytest.mark.parametrize(
    ("answer", "reply", "there"),
    [
        ("12", "123", False),
        ("12", "It has 12.", True),
        ("apple", "a pineapple", False),
        ("apple", "apples", False),
        ("quiet-oak", "Quiet-Oak: 4", True),
        ("f(a)", "def f(a):", True),
        ("f(a)", "def if(a):", False),
    ],
)
def test_words_match_whole(answer: str, reply: str, there: bool) -> None:
    assert occurs(answer, reply) == there


def test_code_may_be_laid_out_and_quoted_otherwise() -> None:
    asked = question("code", "join(self, sep=', ')")
    assert score_reply(asked, '```python\ndef join( self,\n    sep = ", " ):\n```') == 1
    assert score_reply(asked, "def rejoin(self, sep=', ')") == 0
    assert score_reply(asked, "def join(self, sep='; ')") == 0


@pytest.mark.parametrize(
    "reply", ["dapomi", " Dapomi. ", "Label: dapomi", "The label is **dapomi**", "\n`dapomi`\nok"]
)
def test_exact_sees_through_markup(reply: str) -> None:
    assert score_reply(question("exact", "dapomi"), reply) == 1


@pytest.mark.parametrize("reply", ["dapomi or rokifo", "rokifo\ndapomi", "", "dapom"])
def test_exact_wants_the_answer_and_nothing_else_first(reply: str) -> None:
    assert score_reply(question("exact", "dapomi"), reply) == 0


def test_f1_by_hand() -> None:
    """Of "the" and "and" nothing counts: 2 words shared of 3 said and 2 wanted."""
    assert token_f1("The red, and blue", "red blue ball") == pytest.approx(2 * 2 / (3 + 2))
    assert score_reply(question("f1", "seven", "red blue"), "red blue") == 1


@given(one=PHRASE, other=PHRASE)
def test_f1_is_symmetric_and_1_only_for_the_same_words(one: str, other: str) -> None:
    assert token_f1(one, other) == token_f1(other, one)
    assert (token_f1(one, other) == 1) == (sorted(one.split()) == sorted(other.split()))


def test_parts_of_a_list_are_matched_one_by_one() -> None:
    asked = question("f1_parts", "beach, mountains, forest")
    assert score_reply(asked, "forest, beach, mountains") == 1
    assert score_reply(asked, "the beach, a desert") == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("(b)", 1),
        ("b", 1),
        ("B.", 1),
        ("(a)", 0),
        ("a", 0),
        ("It is not mentioned.", 1),
        ("a blue boat", 0),
    ],
)
def test_an_option_is_chosen_by_letter_or_words(reply: str, right: int) -> None:
    assert score_reply(question("choice", "(b)", "Not mentioned"), reply) == right
