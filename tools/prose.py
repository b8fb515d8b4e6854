"""Measures the sentences of README, CONTRIBUTING, CHANGELOG, docs and docstrings.

`python -m tools.prose` prints the mean of each file and the long sentences, and how many words each
page has. Code, tables, headings and the parts that a command writes are left out of sentences; so
are doctest lines and indented blocks of a docstring.
"""

from __future__ import annotations

import ast
import re
from inspect import cleandoc
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
)
MODULES = tuple(
    sorted(p for part in ("tangram", "lab/tangram_lab") for p in (ROOT / part).rglob("*.py"))
)
LONG = 35

_LEFT_OUT = re.compile(
    r"^```.*?^```|<!-- (?P<name>[\w .]+?) -->.*?<!-- end (?P=name) -->|<!--.*?-->",
    re.MULTILINE | re.DOTALL,
)
# A block is a paragraph or an item of a list.
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)")
_NO_PROSE = ("|", "#", "![", "    ")
_CODE_LINE = re.compile(r"^(?:    |>>> |\.\.\. ).*$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"\*\*|^(?:[-*]|\d+\.)\s+")
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`\"(ρα])|(?<=[.!?]\))\s+(?=[A-Z`])")


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose; two words are none."""
    blocks = _BLOCK.split(_LEFT_OUT.sub("", text))
    prose = [block for block in blocks if not block.lstrip("\n").startswith(_NO_PROSE)]
    plain = [_MARKS.sub("", _LINK.sub(r"\1", " ".join(block.split()))) for block in prose]
    found = [one for block in plain for one in _END.split(block)]
    return [one for one in found if len(one.split()) > 2]


def count_words(text: str) -> tuple[int, int]:
    """The words of a page's prose, rendered parts included, and those of its tables.

    A word has a letter or a digit. Code blocks and comments have none.
    """
    lines = _CODE_BLOCK.sub("", _COMMENT.sub("", text)).splitlines()
    tables = [line.replace("|", " ") for line in lines if line.lstrip().startswith("|")]
    prose = [line for line in lines if not line.lstrip().startswith("|")]
    return _count(prose), _count(tables)


def _count(lines: list[str]) -> int:
    return sum(any(map(str.isalnum, word)) for line in lines for word in line.split())


def docstrings(source: str) -> list[str]:
    """The docstrings of a module, its classes and functions.

    Doctest lines and indented blocks are left out.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    texts = [ast.get_docstring(node, clean=False) for node in nodes]
    return [_CODE_LINE.sub("", cleandoc(text)) for text in texts if text]


def sentences_of(path: Path) -> list[str]:
    """The sentences of a page, or of the docstrings of a module."""
    text = path.read_text()
    if path.suffix != ".py":
        return sentences(text)
    return [one for docstring in docstrings(text) for one in sentences(docstring)]


def lengths(paths: tuple[Path, ...] = PAGES) -> list[int]:
    """Words of each sentence of `paths`, pages or modules."""
    return [len(one.split()) for path in paths for one in sentences_of(path)]


def share_of_long(words: list[int]) -> float:
    """How many of the sentences have more than `LONG` words, 0 to 1."""
    return sum(one > LONG for one in words) / len(words)


def _summary(words: list[int]) -> str:
    return f"{fmean(words):.1f} words a sentence, {share_of_long(words):.1%} over {LONG}"


def _report(kind: str, paths: tuple[Path, ...]) -> None:
    for path in paths:
        words = lengths((path,))
        if not words:
            continue
        print(f"{path.relative_to(ROOT)}: {_summary(words)}")
        if path.suffix == ".md":
            print("  {:,} words of prose, {:,} of tables".format(*count_words(path.read_text())))
        for one in sentences_of(path):
            if len(one.split()) > LONG:
                print(f"  {len(one.split())}: {one[:100]}")
    print(f"all {kind}: {_summary(lengths(paths))}")


def _main() -> None:
    _report("pages", PAGES)
    _report("docstrings", MODULES)


if __name__ == "__main__":
    _main()
