"""What is published names a commit that is kept, had no changes, and is not too old."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.published import (
    MOST_COMMITS,
    ROOT,
    RawFile,
    cited_commits,
    count_commits_since,
    has_history,
    raw_files,
)
from bench.render.page import TEMPLATES, Page, page_names

with_history = pytest.mark.skipif(
    not has_history(), reason="needs the whole history: the sources lie without it"
)
FILES = {file.name: file for file in raw_files()}
PROSE = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [
    *sorted(TEMPLATES.rglob("*.md")),
    *(
        path
        for part in ("bench", "lab", "tangram", "tools")
        for path in sorted((ROOT / part).rglob("*.py"))
    ),
]
FOREIGN = {"167928b"}  # of FastTree-Artifact
# Which entries a rule keeps and what a model then answers, by bits and not by the clock. The tests
# of scorers, budgets and selection hold the rules since. One is of another project, kvpress.
OF_ANSWERS = {
    *("accuracy", "accuracy_evidence", "accuracy_kvpress"),
    *(f"calibration_{scorer}" for scorer in ("expected_attention", "fastkvzip", "keydiff")),
    *("calibration_kvzip", "calibration_snapkv"),
}


def is_kept(commit: str) -> bool:
    """Whether git has it, and HEAD follows from it."""
    try:
        return count_commits_since(commit) >= 0
    except KeyError:
        return False


def faults(file: RawFile) -> Iterator[str]:
    """What is wrong with where a raw file comes from."""
    if not file.commits:
        yield f"{file.name} names no commit"
    for commit in file.commits:
        if commit.endswith("+"):
            yield f"{file.name} is of {commit}, which had changes"
        elif not is_kept(commit):
            yield f"{file.name} is of {commit}, which git does not have"
        elif (age := count_commits_since(commit)) > MOST_COMMITS:
            yield f"{file.name} is of {commit}, {age} commits ago"


@with_history
@pytest.mark.parametrize("path", PROSE + SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_commit_is_kept(path: Path) -> None:
    cited = cited_commits(path.read_text(encoding="utf-8")) - FOREIGN
    assert {commit for commit in cited if not is_kept(commit)} == set()


@with_history
@pytest.mark.parametrize("name", sorted(FILES.keys() - OF_ANSWERS))
def test_a_raw_file_is_of_a_commit_that_is_kept_clean_and_not_too_old(name: str) -> None:
    assert list(faults(FILES[name])) == [], (
        "measure it again with its command, or delete it and what pages say of it"
    )


@with_history
@pytest.mark.parametrize("name", sorted(OF_ANSWERS))
def test_no_raw_file_is_excused_without_need(name: str) -> None:
    assert list(faults(FILES[name])), f"{name} needs no excuse any more"


def test_every_raw_file_is_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    read, used = Path.read_text, set[str]()

    def read_and_note(path: Path, *arguments: str | None, **named: str | None) -> str:
        used.add(path.stem)
        return read(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read_and_note)
    for name in page_names():
        Page(name).blocks()
    monkeypatch.undo()
    named = "".join(path.read_text(encoding="utf-8") for path in PROSE)
    named += (ROOT / "tools" / "learn_data.py").read_text() + (
        ROOT / "bench" / "roofline.py"
    ).read_text()
    unused = {name for name in FILES if name not in used and name not in named}
    assert unused == set(), "a raw file that no page shows is deleted"


def test_commits_are_found_in_prose_and_not_in_other_words(tmp_path: Path) -> None:
    text = "since commit 7405979, of 3cb9334 and `fc27280+`; sha256 f7f7d3803b9/x, 20260601, facade"
    assert cited_commits(text) == {"7405979", "3cb9334", "fc27280"}
    path = tmp_path / "kept.json"
    path.write_text(json.dumps([{"environment": {"commit": "abc1234+"}, "command": "make"}] * 2))
    assert RawFile(path).commits == ["abc1234+"] and RawFile(path).commands == ["make"]
    assert list(faults(RawFile(path))) == ["kept is of abc1234+, which had changes"]
