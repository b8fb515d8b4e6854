"""Calibration texts: mixed, long enough for three chunks, and the same every time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from tangram.calibrate.texts import KINDS, list_kinds, make_texts
from tangram.errors import ConfigError


def test_fifty_texts_of_the_promised_length_all_different() -> None:
    texts = make_texts()
    assert len(texts) == len(set(texts)) == 50
    assert all(8_000 <= len(text) <= 16_000 for text in texts)


@pytest.mark.parametrize("min_characters", [1_000, 5_000, 12_288])
def test_lengths_follow_the_minimum(min_characters: int) -> None:
    lengths = [
        len(text)
        for seed in range(4)
        for text in make_texts(16, seed, min_characters=min_characters)
    ]
    assert min_characters <= min(lengths)
    assert max(lengths) <= 1.5 * min_characters + 200


def test_another_process_writes_the_same_texts_and_another_seed_others() -> None:
    """Text seeds must not depend on Python's per-process string hashing."""
    program = (
        "import sys; from tangram.calibrate.texts import make_texts; "
        "sys.stdout.write(chr(0).join(make_texts(9, 7)))"
    )
    other = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    mine = make_texts(9, 7)
    assert other.stdout.split("\0") == [text.replace("\r\n", "\n") for text in mine]
    assert not set(mine) & set(make_texts(9, 8))
    assert make_texts(3, 7) == mine[:3], "fewer texts are the first of more"


def test_kinds_are_evenly_mixed() -> None:
    assert len(KINDS) >= 6
    texts = make_texts(4 * len(KINDS))
    looks = Counter(
        "json"
        if text.startswith("Below is a JSON")
        else "table"
        if text.startswith("| No")
        else "other"
        for text in texts
    )
    assert looks == {"json": 4, "table": 4, "other": 4 * (len(KINDS) - 2)}
    assert sum("def " in text or "import " in text for text in texts) >= 4
    json_kinds = [
        kind
        for kind, text in zip(list_kinds(len(texts)), texts, strict=True)
        if text.startswith("Below")
    ]
    assert json_kinds == ["key_values"] * 4


@pytest.mark.parametrize("seed", range(5))
def test_retrieval_tasks_hold_the_answer_to_their_question(seed: int) -> None:
    texts = dict(zip(KINDS, make_texts(len(KINDS), seed), strict=True))
    question = re.search(r"Question: What is (the secret pass phrase of .+)\?", texts["needle"])
    assert question
    assert re.search(rf"T{question[1][1:]} is [a-z-]+-\d+\.", texts["needle"])
    asked = re.findall(r"Question: When was (.+) born\?", texts["facts"])
    assert len(asked) == 3
    assert all(re.search(rf"{person} was born in \d{{4}}", texts["facts"]) for person in asked)
    key = texts["key_values"].rsplit('"', 2)[1]
    assert f'"{key}": "' in texts["key_values"]


def test_texts_are_varied_not_one_line_over_and_over() -> None:
    for text in make_texts(len(KINDS)):
        lines = [line for line in re.split(r"\n|(?<=[.?!]) ", text) if len(line) > 40]
        assert len(set(lines)) > 0.8 * len(lines)


@pytest.mark.parametrize(
    ("arguments", "named"), [({"count": 0}, "count"), ({"min_characters": 10}, "min_characters")]
)
def test_nonsense_is_refused_by_name(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_texts(**arguments)
