"""README and docs are in short sentences, and the measure can tell."""

from __future__ import annotations

from statistics import fmean

import pytest

from tools.prose import LONG, PAGES, lengths, sentences, share_of_long


def test_a_sentence_has_few_words_on_average() -> None:
    assert fmean(lengths()) <= 17, "run python -m tools.prose"


def test_few_sentences_are_long() -> None:
    assert share_of_long(lengths()) <= 0.03, "run python -m tools.prose"


def test_every_page_is_measured() -> None:
    assert {"README.md", "http.md", "accuracy.md"} <= {page.name for page in PAGES}
    assert all(lengths((page,)) for page in PAGES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two three. Four five six.", ["One two three.", "Four five six."]),
        ("- One two three.\n- Four five six\n  seven.", ["One two three.", "Four five six seven."]),
        ("**One two three.** Four [five](six.md) six.", ["One two three.", "Four five six."]),
        ("# A heading here\n\nOne two three.\n\n```\nsome code that runs\n```", ["One two three."]),
        ("| a b c | d e f |\n|---|---|\n\nOne two three.", ["One two three."]),
        ("<!-- a 0.5 -->\nFour five six.\n<!-- end a 0.5 -->\nOne two three.", ["One two three."]),
        ("In 0.5 s three of v1.2 b.", ["In 0.5 s three of v1.2 b."]),
    ],
)
def test_what_is_prose(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_a_long_sentence_counts() -> None:
    assert share_of_long([LONG, LONG + 1]) == 0.5
