"""Writes the list of modules in docs/structure.md from their docstrings: `make pages`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
PACKAGE, LAB = ROOT / "tangram", ROOT / "lab" / "tangram_lab"
HEADING = "## Every module\n"
_HEAD = "| | |\n|---|---|\n"
_REMARK = re.compile(r" \([^()]*\)")  # a paper, or what a word stands for
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
# What stands before a colon is enough if it has so many words.
_CLAUSE_WORDS = 3
# So is what stands before a comma, behind which the sentence only says more of it.
_SAYS_MORE = re.compile(
    r", (?=(?:and|as|but|by|for|found|from|how|in|inside|made|not|of|on|or|read|rendered|so|that|"
    r"until|what|when|where|which|whose|with|without) )"
)


def render(package: Path = PACKAGE, lab: Path = LAB) -> str:
    """The list: a table for each package, one for the modules beside them, and one for the lab."""
    own = _table("Modules of the package itself", package, _parts(package, packages=False))
    beside = _table("`tangram_lab`", lab, _parts(lab))
    return HEADING + "".join([*_packages(package), own, beside])


def first_words(path: Path) -> str:
    """The first sentence of a module's docstring, or what stands before its colon or a clause.

    What is in brackets is left out. Raises `ValueError` if there is no docstring.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} has no docstring, whose first words docs/structure.md shows")
    first = _REMARK.sub("", " ".join(text.split("\n\n")[0].split()))
    sentence, *_ = _SENTENCE_END.split(first)
    for clause, *rest in (sentence.split(": ", 1), _SAYS_MORE.split(sentence, maxsplit=1)):
        if rest and len(clause.split()) >= _CLAUSE_WORDS:
            return f"{clause}."
    return sentence


def replace_list(text: str) -> str:
    """The page with the list of now; whatever stands below the heading is replaced."""
    return text.partition(HEADING)[0] + render()


def _packages(package: Path) -> Iterator[str]:
    for init in sorted(package.glob("*/**/__init__.py")):
        if parts := list(_parts(init.parent, packages=False)):
            yield _table(f"`{init.parent.relative_to(package)}`", init.parent, parts)


def _table(title: str, package: Path, parts: list[Path] | Iterator[Path]) -> str:
    rows = "".join(_row(part) for part in parts)
    said = f"{first_words(package / '__init__.py')}\n\n"
    return f"\n### {title}\n\n{said}{_HEAD}{rows}"


def _parts(folder: Path, *, packages: bool = True) -> Iterator[Path]:
    """The modules of a folder, and the packages in it (those without modules alone, if asked)."""
    for path in sorted(folder.iterdir()):
        module = path.suffix == ".py" and path.name != "__init__.py"
        package = (path / "__init__.py").exists() and (packages or not any(_parts(path)))
        if module or package:
            yield path


def _row(path: Path) -> str:
    name, source = (f"{path.name}/", path / "__init__.py") if path.is_dir() else (path.name, path)
    said = first_words(source).replace("|", r"\|")
    return f"| `{name}` | {said} |\n"


if __name__ == "__main__":
    PAGE.write_text(replace_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
