"""LoCoMo's files: whole sessions that fit, each question asked where its evidence is or counted as
dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.errors import ConfigError
from tangram_lab.accuracy import locomo
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.grading import score_reply
from tangram_lab.accuracy.sample import Question, Sample
from tangram_lab.accuracy.suites import SUITES
from tests.mentions import mentioning

SESSIONS = 6
LONG = " ".join(["and we talked about the weather"] * 10)


def count_words(text: str) -> int:
    return len(text.split())


def turn(session: int, number: int) -> dict[str, Any]:
    speaker = ("Nils", "Rosa")[number % 2]
    spoken = {
        "speaker": speaker,
        "dia_id": f"D{session}:{number}",
        "text": f"In week {session}.{number} {LONG}",
    }
    return (
        {**spoken, "img_url": ["x"], "blip_caption": "a photo of a kite"} if number == 2 else spoken
    )


def make_question(category: int, *evidence: str, **more: Any) -> dict[str, Any]:
    question = f"Category {category}, evidence {' '.join(evidence)}?"
    answer = (
        {"adversarial_answer": "a red kite"} if category == 5 else {"answer": "seven kites, a rope"}
    )
    return {
        "question": question,
        "category": category,
        "evidence": list(evidence),
        **answer,
        **more,
    }


def document(*questions: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose last session has a date and no turns, as some files have."""
    sessions: dict[str, Any] = {"speaker_a": "Nils", "speaker_b": "Rosa"}
    for number in range(1, SESSIONS + 1):
        sessions[f"session_{number}_date_time"] = f"1:00 pm on {number} May, 2023"
        sessions[f"session_{number}"] = [turn(number, one) for one in range(1, 5)]
        sessions[f"events_session_{number}"] = {"Nils": []}
    sessions["session_99_date_time"], sessions["session_99"] = "late", []
    return {**sessions, "qa": list(questions)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def read(folder: Path, content: Any, context_tokens: int = 10_000, seed: int = 0) -> list[Sample]:
    (folder / "7.json").write_text(json.dumps(content), encoding="utf-8")
    return locomo.read_samples(folder, Budget(count_words, context_tokens), seed)


def only_question(folder: Path, question: dict[str, Any]) -> Question:
    (made,) = read(folder, document(question))
    (one,) = made.questions
    return one


def session_of(evidence: str) -> int:
    return int(evidence[1:].split(":")[0])


TURNS = st.builds("D{}:{}".format, st.integers(1, SESSIONS), st.integers(1, 4))


@given(
    evidence=st.lists(st.lists(TURNS, max_size=3), min_size=1, max_size=12),
    context_tokens=st.integers(330, 1_900),
)
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_every_question_is_asked_where_its_evidence_is_or_counted(
    folder: Path, evidence: list[list[str]], context_tokens: int
) -> None:
    questions = [
        make_question(4, "D1:1"),
        *(make_question(1 + number % 5, *ids) for number, ids in enumerate(evidence)),
    ]
    made = read(folder, document(*questions), context_tokens)
    assert sum(len(one.questions) + one.dropped_questions for one in made) == len(questions)
    for one in made:
        assert count_words(one.context) <= context_tokens
        assert one.questions
        assert all(question.evidence for question in one.questions)
        assert all(
            piece in one.context for question in one.questions for piece in question.evidence
        )
    if (
        len({one.context for one in made}) == 1
        and "week 6.4" in made[0].context
        and "week 1.1" in made[0].context
    ):
        assert made[0].dropped_questions == sum(not ids for ids in evidence), (
            "nothing is cut, so only these are lost"
        )


def test_windows_hold_whole_sessions_once_each_in_order(folder: Path) -> None:
    questions = [make_question(4, f"D{number}:1") for number in range(1, SESSIONS + 1)]
    made = read(folder, document(*questions), 700)
    assert len(made) > 1
    for number in range(1, SESSIONS + 1):
        holding = [one for one in made if f"DATE: 1:00 pm on {number} May" in one.context]
        assert len(holding) == 1
        assert all(f"In week {number}.{one} " in holding[0].context for one in range(1, 5))
    assert [one.number for one in made] == list(range(len(made)))
    assert {one.task for one in made} == {"7"}
    first = [one.context.index("DATE: 1:00 pm on") for one in made]
    assert all(
        "two people: Nils and Rosa" in one.context[:place]
        for one, place in zip(made, first, strict=True)
    )


def test_sessions_go_by_number_not_by_name(folder: Path) -> None:
    content = document(make_question(4, "D1:1"))
    content["session_10"], content["session_10_date_time"] = [turn(10, 1)], "June"
    (made,) = read(folder, content)
    assert made.context.index("In week 6.4") < made.context.index("In week 10.1")


def test_a_turn_is_told_with_its_speaker_and_its_photo(folder: Path) -> None:
    one = only_question(folder, make_question(4, "D3:2"))
    assert one.evidence == (f'Nils said, "In week 3.2 {LONG}" and shared a photo of a kite.',)


@pytest.mark.parametrize("category", [1, 2, 3, 4])
def test_the_gold_answer_gets_1_and_another_0(folder: Path, category: int) -> None:
    one = only_question(folder, make_question(category, "D1:1"))
    assert score_reply(one, "seven kites, a rope") == 1
    assert score_reply(one, "It rained") == 0
    assert one.category == locomo.CATEGORIES[category]
    assert one.text.endswith("Short answer:")
    assert ("Use DATE of CONVERSATION" in one.text) == (category == 2)


def test_multi_hop_answers_are_graded_part_by_part(folder: Path) -> None:
    for category, expected in ((1, 1 / 2), (4, 2 / 5)):
        one = only_question(folder, make_question(category, "D1:1"))
        assert score_reply(one, "a rope, a dog") == pytest.approx(expected)


def test_the_annotators_reason_is_no_part_of_the_answer(folder: Path) -> None:
    one = only_question(folder, make_question(3, "D1:1", answer="Likely no; since it went badly"))
    assert score_reply(one, "likely no") == 1


def test_years_written_as_numbers_are_answers(folder: Path) -> None:
    assert (
        score_reply(only_question(folder, make_question(2, "D1:1", answer=2022)), "In 2022") > 0.6
    )


def test_an_adversarial_question_offers_both_options_in_either_order(folder: Path) -> None:
    letters = Counter()
    for seed in range(20):
        (made,) = read(folder, document(make_question(5, "D1:1")), seed=seed)
        (one,) = made.questions
        options = (
            one.text.split("Select the correct answer: (a) ")[1]
            .split(" Short answer")[0]
            .rstrip(".")
        )
        right = "(a)" if options.split(" (b) ")[0].startswith("Not mentioned") else "(b)"
        wrong = {"(a)": "(b)", "(b)": "(a)"}[right]
        assert sorted(options.split(" (b) ")) == ["Not mentioned in the conversation", "a red kite"]
        assert score_reply(one, right) == score_reply(one, "Not mentioned in the conversation") == 1
        assert score_reply(one, wrong) == score_reply(one, "a red kite") == 0
        letters[right] += 1
    assert set(letters) == {"(a)", "(b)"}


def test_without_a_wrong_option_the_adversarial_question_is_open(folder: Path) -> None:
    for wrong in (None, "Not mentioned"):
        one = only_question(folder, make_question(5, "D1:1", adversarial_answer=wrong))
        assert "(a)" not in one.text
        assert score_reply(one, "That was not mentioned.") == 1
        assert score_reply(one, "a red kite") == 0


@pytest.mark.parametrize(
    ("evidence", "turns"),
    [(["D2:1; D2:3"], 2), (["D:2:1"], 1), (["D2:01"], 1), (["D2:1", "D", "D2:1"], 1)],
)
def test_evidence_is_read_as_the_files_have_it(
    folder: Path, evidence: list[str], turns: int
) -> None:
    assert len(only_question(folder, make_question(4, *evidence)).evidence) == turns


@pytest.mark.parametrize(
    "lost",
    [
        make_question(4),
        make_question(4, "D1:1", "D1:99"),
        make_question(4, "D77:1"),
        make_question(4, "D1:1", answer=""),
    ],
)
def test_questions_that_cannot_be_placed_or_graded_are_counted(
    folder: Path, lost: dict[str, Any]
) -> None:
    (made,) = read(folder, document(make_question(4, "D1:1"), lost))
    assert (len(made.questions), made.dropped_questions) == (1, 1)


def test_lists_of_conversations_and_their_ids_are_read(folder: Path) -> None:
    one = document(make_question(4, "D1:1"))
    nested = {
        "sample_id": "conv-26",
        "conversation": {k: v for k, v in one.items() if k != "qa"},
        "qa": one["qa"],
    }
    made = read(folder, [nested, one])
    assert [sample.task for sample in made] == ["conv-26", "7-1"]
    assert made[0].context == made[1].context


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "LoCoMo"),
        ('{"qa": []}', "LoCoMo"),
        ("3", "LoCoMo"),
        ("[[]]", "LoCoMo"),
    ],
)
def test_other_files_are_refused_by_name(folder: Path, content: str, said: str) -> None:
    file = folder / "9.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"path.*9.json.*{said}"):
        locomo.read_samples(file, Budget(count_words, 1_000), 0)


def test_missing_files_and_empty_folders_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=mentioning(f"{folder}/none.json")):
        locomo.read_samples(folder / "none.json", Budget(count_words, 1_000), 0)
    with pytest.raises(ConfigError, match=r"path.*without \*.json"):
        locomo.read_samples(folder, Budget(count_words, 1_000), 0)


def test_a_context_shorter_than_any_session_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context_tokens is 50"):
        read(folder, document(make_question(4, "D1:1")), 50)


def test_the_suite_picks_samples_categories_and_first_questions(folder: Path) -> None:
    questions = [
        make_question(category, f"D{number}:1")
        for number in range(1, 7)
        for category in range(1, 6)
    ]
    (folder / "7.json").write_text(json.dumps(document(*questions)), encoding="utf-8")
    everything = SUITES["locomo"](count_words, 700, 3, path=folder)
    assert SUITES["locomo"](count_words, 700, path=folder) == everything, "all that the files give"
    assert sum(len(one.questions) for one in everything) == len(questions)
    assert SUITES["locomo"](count_words, 700, 2, path=folder) == everything[:2]
    few = SUITES["locomo"](count_words, 700, 3, path=folder, max_questions=5)
    assert all(
        {one.category for one in sample.questions} == set(locomo.CATEGORIES.values())
        for sample in few
    )
    temporal = SUITES["locomo"](count_words, 700, 3, path=folder, tasks=["temporal"])
    assert [len(one.questions) for one in temporal] == [
        len(one.questions) // 5 for one in everything
    ]
    with pytest.raises(ConfigError, match=mentioning("samples 4 3 700")):
        SUITES["locomo"](count_words, 700, 4, path=folder)
    with pytest.raises(ConfigError, match=mentioning("tasks 'vt' temporal")):
        SUITES["locomo"](count_words, 700, 1, path=folder, tasks=["vt"])
