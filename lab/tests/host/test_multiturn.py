"""Shared contexts with several questions: each answer follows from the context by a parser of a few
lines.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from lab.tests.host.asking import sample
from tangram.errors import ConfigError
from tangram_lab.accuracy import code_lookup
from tangram_lab.accuracy.grading import score_reply

CASES = [(context_tokens, number) for context_tokens in (512, 3_000) for number in range(3)]


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_the_object_is_json_and_gives_the_values(context_tokens: int, number: int) -> None:
    made = sample("multiturn", "key_values", context_tokens, number)
    values = json.loads(made.context.split("JSON data:\n")[1])
    assert len(set(values.values()) | set(values)) == 2 * len(values)
    assert len(made.questions) == 5
    for question in made.questions:
        assert question.answers == (values[question.text.split('"')[1]],)


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_only_both_ends_together_tell_the_string(context_tokens: int, number: int) -> None:
    made = sample("multiturn", "prefix_suffix", context_tokens, number)
    strings = re.findall(r"^[a-z0-9]{36}$", made.context, re.MULTILINE)
    assert len(set(strings)) == len(strings)
    for question in made.questions:
        begin, end = question.text.split('"')[1::2]
        assert [one for one in strings if one.startswith(begin) and one.endswith(end)] == list(
            question.answers
        )
        assert sum(one.startswith(begin) for one in strings) == 2
        assert sum(one.endswith(end) for one in strings) == 2


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_a_label_follows_from_the_thing_a_sentence_is_about(
    context_tokens: int, number: int
) -> None:
    made = sample("multiturn", "many_shot", context_tokens, number)
    shots = re.findall(r"Sentence: (.+)\nLabel: (\w+)", made.context)
    labels_of: dict[str, set[str]] = defaultdict(set)
    for told, label in shots:
        for word in re.findall(r"\w+", told):
            labels_of[word].add(label)
    assert len(made.questions) == 5
    for question in made.questions:
        told = re.findall(r"Sentence: (.+)\n", question.text)[0]
        assert told not in dict(shots), "the sentence is a new one"
        thing = next(
            word
            for word in re.findall(r"\w+", told)
            if word in question.evidence[0] and word in THINGS
        )
        assert labels_of[thing] == set(question.answers)
    counts = Counter(label for _, label in shots)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1, "a guess is right one time in four"


THINGS = {
    *(
        "sparrow",
        "badger",
        "salmon",
        "tortoise",
        "beetle",
        "donkey",
        "otter",
        "pigeon",
        "lizard",
        "hamster",
    ),
    *(
        "bread",
        "soup",
        "cheese",
        "pancake",
        "noodle",
        "pudding",
        "salad",
        "biscuit",
        "sausage",
        "omelette",
    ),
    *(
        "violin",
        "trumpet",
        "drum",
        "flute",
        "piano",
        "cello",
        "guitar",
        "harp",
        "clarinet",
        "accordion",
    ),
    *(
        "train",
        "bicycle",
        "ferry",
        "tractor",
        "tram",
        "helicopter",
        "canoe",
        "lorry",
        "scooter",
        "bus",
    ),
}


@pytest.mark.parametrize(("context_tokens", "number"), CASES)
def test_the_report_states_every_figure_once(context_tokens: int, number: int) -> None:
    made = sample("multiturn", "report", context_tokens, number)
    stated = re.findall(r"The station of (\w+) reported (\d+) passengers\.", made.context)
    every, *single = made.questions
    assert sorted(every.answers) == sorted(piece for fact in stated for piece in fact)
    assert all(made.context.count(answer) == 1 for answer in every.answers)
    for question in single:
        place = re.findall(r"station of (\w+) report\?", question.text)[0]
        assert question.answers == (dict(stated)[place],)


def definition(context: str, name: str) -> ast.FunctionDef:
    """The function of that name, read from the context alone."""
    (start,) = (match.start() for match in re.finditer(rf"^def {name}\(", context, re.MULTILINE))
    lines = context[start:].split("\n")
    for end in range(len(lines), 0, -1):
        try:
            (node,) = ast.parse("\n".join(lines[:end])).body[:1]
        except SyntaxError:
            continue
        assert isinstance(node, ast.FunctionDef)
        return node
    raise AssertionError(f"{name} cannot be parsed")


def tell_answer(context: str, text: str) -> str:
    """What a reader of the source answers."""
    name = re.findall(r"function (\w+)", text)[0]
    node = definition(context, name)
    if "the parameters of" in text:
        return f"{name}({ast.unparse(node.args)})"
    if "line of the docstring" in text:
        return (ast.get_docstring(node) or "").split("\n")[0]
    (returned,) = (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value)
    return ast.unparse(returned)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("context_tokens", [512, 3_000])
def test_functions_are_there_in_full_and_can_be_looked_up(context_tokens: int, number: int) -> None:
    made = sample("multiturn", "code_lookup", context_tokens, number)
    assert 1 <= len(made.questions) <= 4
    if context_tokens > 512:
        assert len(made.questions) == 4
    for question in made.questions:
        assert score_reply(question, tell_answer(made.context, question.text)) == 1
        assert made.context.count(question.evidence[0]) == 1
        assert question.evidence[0].count(question.answers[0]) == 1


def test_all_three_things_are_asked_about_functions() -> None:
    texts = [
        q.text
        for number in range(6)
        for q in sample("multiturn", "code_lookup", 3_000, number).questions
    ]
    assert all(
        any(word in text for text in texts)
        for word in ("the parameters of", "line of the docstring", "return?")
    )


def test_functions_are_those_of_real_files() -> None:
    made = sample("multiturn", "code_lookup", 3_000)
    file = re.findall(r"^# (\w+\.py)$", made.context, re.MULTILINE)[0]
    first = made.context.split(f"# {file}\n")[1].split("\n")[0]
    assert first in (Path(sysconfig.get_path("stdlib")) / file).read_text(encoding="utf-8")


def test_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_lookup.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=f"code_lookup.*{tmp_path}"):
        sample("multiturn", "code_lookup")
