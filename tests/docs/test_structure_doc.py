"""docs/structure.md names what there is, and lists every module as its docstring says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.structure_page import HEADING, PAGE, first_words, render, replace_list

ROOT = Path(__file__).parents[2]
TEXT = PAGE.read_text()


def test_the_list_is_what_the_docstrings_say() -> None:
    assert replace_list(TEXT) == TEXT, "run make pages"


def test_every_module_and_package_is_listed() -> None:
    rows = re.findall(r"^\| `([\w./]+)` \| \S", render(), re.MULTILINE)
    assert len(rows) > 200 and {"manager.py", "snapkv.py", "types.py", "profiles/"} <= set(rows)
    inside = (ROOT / "tangram").glob("*/**/__init__.py")
    packages = {str(path.parent.relative_to(ROOT / "tangram")) for path in inside}
    assert {"cache", "engine/passes", "compress/scorers"} <= packages
    assert all(f"### `{name}`\n" in TEXT or f"| `{name}/` |" in TEXT for name in packages)


def test_a_module_is_described_by_its_first_words(tmp_path: Path) -> None:
    package = tmp_path / "own"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text('"""The whole. More of it."""\n')
    (package / "inner" / "__init__.py").write_text('"""What is inside."""\n')
    (package / "inner" / "part.py").write_text('"""One of a | b, e.g. this: more. And more."""\n')
    assert render(package, package / "inner").startswith(
        HEADING + "\n### `inner`\n\nWhat is inside.\n\n"
        "| | |\n|---|---|\n| `part.py` | One of a \\| b, e.g. this. |\n"
        "\n### Modules of the package itself\n\nThe whole.\n\n| | |\n|---|---|\n"
    )
    (package / "inner" / "part.py").write_text("PART = 1\n")
    with pytest.raises(ValueError, match=r"part\.py has no docstring"):
        first_words(package / "inner" / "part.py")


def test_every_file_that_is_named_exists() -> None:
    folders = (ROOT / part for part in ("tangram", "bench", "tests", "lab"))
    files = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert set(re.findall(r"`(?:\w+/)*(\w+\.py)`", TEXT)) <= files


def test_every_class_that_is_named_exists() -> None:
    written, _, listed = TEXT.partition(HEADING)
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w*)`", written))
    source = "".join(path.read_text() for path in (ROOT / "tangram").rglob("*.py"))
    assert listed and {"Scheduler", "CacheManager"} <= named
    assert named <= set(re.findall(r"^class (\w+)", source, re.MULTILINE))
