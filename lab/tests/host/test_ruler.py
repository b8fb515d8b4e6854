"""RULER's tasks: a parser of a few lines finds every answer in the context, and finds it once."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from lab.tests.host.asking import sample
from tangram_lab.accuracy.needles import NEEDLES
from tangram_lab.accuracy.sample import Sample

CASES = [(context_tokens, number) for context_tokens in (512, 3_000) for number in range(3)]
NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")


def hidden(made: Sample) -> list[tuple[str, str]]:
    return NEEDLE.findall(made.context)


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
@pytest.mark.parametrize("task", NEEDLES)
def test_needles_of_the_keys_asked_for_hold_the_answers(
    task: str, context_tokens: int, number: int
) -> None:
    made = sample("ruler", task, context_tokens, number)
    for question in made.questions:
        asked = (
            question.text.split("mentioned")[0]
            .split(" for ")[1]
            .replace(",", " ")
            .replace(" and ", " ")
            .split()
        )
        values = [value for key, value in hidden(made) if key in asked]
        assert sorted(values) == sorted(question.answers)
        assert len(values) == NEEDLES[task].values_per_key * len(asked)


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
@pytest.mark.parametrize("task", NEEDLES)
def test_no_two_needles_have_the_same_value(task: str, context_tokens: int, number: int) -> None:
    made = sample("ruler", task, context_tokens, number)
    values = Counter(value for _, value in hidden(made))
    assert max(values.values()) == 1
    keys = Counter(key for key, _ in hidden(made))
    assert set(keys.values()) == {NEEDLES[task].values_per_key}
    assert all(
        len(re.findall(rf"\b{answer}\b", made.context)) == 1
        for q in made.questions
        for answer in q.answers
    )


def test_the_variants_differ_as_in_the_paper() -> None:
    """Table 2: what keys and values are, how many, what they hide in; checked by what a reader
    sees.
    """
    many = {task: len(hidden(sample("ruler", task, 3_000))) for task in NEEDLES}
    assert [many[f"niah_single_{n}"] for n in (1, 2, 3)] == [1, 1, 1]
    assert [many[f"niah_{n}"] for n in ("multikey_1", "multivalue", "multiquery")] == [4, 4, 4]
    assert many["niah_multikey_2"] > 100
    assert many["niah_multikey_3"] > 40
    uuid = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
    keys_and_values = {task: hidden(sample("ruler", task))[0] for task in NEEDLES}
    assert [task for task, (key, _) in keys_and_values.items() if uuid.fullmatch(key)] == [
        "niah_multikey_3"
    ]
    with_uuids = [task for task, (_, value) in keys_and_values.items() if uuid.fullmatch(value)]
    assert with_uuids == ["niah_single_3", "niah_multikey_3"]
    assert [task for task in NEEDLES if "The grass is green." in sample("ruler", task).context] == [
        "niah_single_1"
    ]
    texts = {task: sample("ruler", task).questions for task in NEEDLES}
    assert texts["niah_single_1"][0].text.startswith("What is the special magic number for ")
    assert texts["niah_multiquery"][0].text.startswith(
        "What are all the special magic numbers for "
    )
    assert {task: len(questions) for task, questions in texts.items()} == {
        task: 4 if "multikey" in task else 1 for task in NEEDLES
    }


def test_needles_lie_at_all_depths() -> None:
    depths = [
        made.context.index(made.questions[0].evidence[0]) / len(made.context)
        for made in (sample("ruler", "niah_single_1", number=number) for number in range(40))
    ]
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    assert all(any(low <= depth < low + 0.25 for depth in depths) for low in (0.1, 0.3, 0.5, 0.7))


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_variables_are_found_by_following_the_chain(context_tokens: int, number: int) -> None:
    made = sample("ruler", "vt", context_tokens, number)
    value_of: dict[str, str] = {}
    for name, given in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", made.context, re.MULTILINE):
        assert name not in value_of
        value_of[name] = value_of.get(given, given)
    which, what = made.questions
    asked = re.findall(r"assigned the value (\d+) in the text above\.", which.text)
    assert sorted(which.answers) == sorted(
        name for name, value in value_of.items() if value == asked[0]
    )
    last = re.findall(r"does the variable (\w+) have", what.text)
    assert what.answers == (value_of[last[0]],)
    assert len(which.answers) == 5


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_the_ten_most_common_words_are_counted_and_far_ahead(
    context_tokens: int, number: int
) -> None:
    made = sample("ruler", "cwe", context_tokens, number)
    listed = re.findall(r"(\d+)\. (\w+)", made.context)
    assert [int(place) for place, _ in listed] == list(range(1, len(listed) + 1))
    ranked = Counter(word for _, word in listed).most_common()
    assert {word for word, _ in ranked[:10]} == set(made.questions[0].answers)
    assert ranked[9][1] >= 3 * ranked[10][1]
    if context_tokens == 3_000:
        assert (ranked[9][1], ranked[10][1]) == (30, 3), "RULER's counts, as soon as there is space"


@pytest.mark.parametrize(("context_tokens", "number"), [*CASES, (20_000, 0)])
def test_the_three_most_frequent_coded_words_are_counted(context_tokens: int, number: int) -> None:
    made = sample("ruler", "fwe", context_tokens, number)
    words = made.context.split("coded words. ")[1].split()
    (dots, first), *ranked = Counter(words).most_common()
    assert dots == "..."
    assert {word for word, _ in ranked[:3]} == set(made.questions[0].answers)
    assert ranked[2][1] > ranked[3][1]
    assert ranked[0][1] == pytest.approx(first / 4, abs=1), "Zipf's law with exponent 2"
    assert ranked[1][1] == pytest.approx(first / 9, abs=1)


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_a_birthplace_stands_in_one_document(context_tokens: int, number: int) -> None:
    made = sample("ruler", "qa_1", context_tokens, number)
    born = re.findall(r"^(.+) was a \w+ who was born in (\w+) in", made.context, re.MULTILINE)
    assert len(dict(born)) == len({town for _, town in born}) == len(born) > 3
    for question in made.questions:
        person = re.findall(r"In which town was (.+) born", question.text)[0]
        assert question.answers == (dict(born)[person],)
        assert made.context.count(question.answers[0]) == 1


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_a_river_is_found_over_two_documents(context_tokens: int, number: int) -> None:
    made = sample("ruler", "qa_2", context_tokens, number)
    town_of = dict(
        re.findall(r"^(.+) was a \w+ and lived in (\w+) until", made.context, re.MULTILINE)
    )
    river_of = dict(
        re.findall(
            r"^(\w+) is a town of [\d,]+ people on the river (\w+)\.", made.context, re.MULTILINE
        )
    )
    assert len(set(river_of.values())) == len(river_of)
    for question in made.questions:
        person = re.findall(r"where (.+) lived\?", question.text)[0]
        assert question.answers == (river_of[town_of[person]],)
        assert made.context.count(question.answers[0]) == 1
        assert not any(
            person in piece and question.answers[0] in piece for piece in question.evidence
        )
    numbers = re.findall(r"^Document (\d+):$", made.context, re.MULTILINE)
    assert [int(one) for one in numbers] == list(range(1, len(numbers) + 1))
