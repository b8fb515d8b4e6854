"""README, docs and docstrings are in short sentences, and the measure can tell."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tools.prose import (
    LONG,
    MODULES,
    PAGES,
    ROOT,
    count_words,
    docstrings,
    lengths,
    sentences,
    share_of_long,
)

CHANGES = tuple(page for page in PAGES if page.name == "CHANGELOG.md")


@pytest.mark.parametrize("paths", [PAGES, CHANGES, MODULES], ids=["pages", "changes", "docstrings"])
def test_sentences_are_short(paths: tuple[Path, ...]) -> None:
    words = lengths(paths)
    assert fmean(words) <= 17, "run python -m tools.prose"
    assert share_of_long(words) <= 0.03, "run python -m tools.prose"


def test_every_page_is_measured() -> None:
    assert {"README.md", "CONTRIBUTING.md", "http.md", "accuracy.md"} <= {
        page.name for page in PAGES
    }
    assert all(lengths((page,)) for page in PAGES)


def test_the_pages_are_few_words() -> None:
    """A page that is read beats many that are not."""
    docs = [count_words(page.read_text()) for page in PAGES if page.parent == ROOT / "docs"]
    prose, tables = (sum(words) for words in zip(*docs, strict=True))
    assert prose <= 28_000 and prose + tables <= 45_000, "run python -m tools.prose"
    (changes,) = CHANGES
    assert sum(count_words(changes.read_text())) <= 600


def test_words_of_tables_stand_apart_and_code_has_none() -> None:
    text = "One · 2 – [three](four.md).\n\n```\nno word\n```\n<!-- none -->\n| a | b 1 |\n|---|\n"
    assert count_words(text) == (3, 3)


def test_every_package_is_measured() -> None:
    measured = {module.parent.name for module in MODULES if lengths((module,))}
    assert {"tangram", "engine", "kernels", "serve", "tangram_lab"} <= measured


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


def test_what_is_prose_of_a_docstring() -> None:
    source = '''"""One two three.

    >>> some_code(that, runs)
    """
class Four:
    """Four five six.

    Args:
        name: what it is called and more.
    """
    def seven(self):
        """Seven eight nine:

            an indented block of words

        and ten.
        """
        # no comment is a docstring
'''
    found = [one for text in docstrings(source) for one in sentences(text)]
    assert found == ["One two three.", "Four five six.", "Seven eight nine:"]
