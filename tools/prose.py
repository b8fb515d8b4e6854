"""Measures the sentences of README and docs: `python -m tools.prose` prints the long ones.

Code, tables, headings and the parts that a command writes are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LONG = 35

_LEFT_OUT = re.compile(
    r"^```.*?^```|<!-- (?P<name>[\w .]+?) -->.*?<!-- end (?P=name) -->|<!--.*?-->",
    re.MULTILINE | re.DOTALL,
)
# A block is a paragraph or an item of a list.
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)")
_NO_PROSE = ("|", "#", "![", "    ")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"\*\*|^(?:[-*]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`\"(ρα])|(?<=[.!?]\))\s+(?=[A-Z`])")


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose; two words are none."""
    blocks = _BLOCK.split(_LEFT_OUT.sub("", text))
    prose = [block for block in blocks if not block.lstrip("\n").startswith(_NO_PROSE)]
    plain = [_MARKS.sub("", _LINK.sub(r"\1", " ".join(block.split()))) for block in prose]
    found = [one for block in plain for one in _END.split(block)]
    return [one for one in found if len(one.split()) > 2]


def lengths(pages: tuple[Path, ...] = PAGES) -> list[int]:
    """Words of each sentence of `pages`."""
    return [len(one.split()) for page in pages for one in sentences(page.read_text())]


def share_of_long(words: list[int]) -> float:
    """How many of the sentences have more than `LONG` words, 0 to 1."""
    return sum(one > LONG for one in words) / len(words)


def _summary(words: list[int]) -> str:
    return f"{fmean(words):.1f} words a sentence, {share_of_long(words):.1%} over {LONG}"


def _main() -> None:
    for page in PAGES:
        words = lengths((page,))
        print(f"{page.name}: {_summary(words)}")
        for one in sentences(page.read_text()):
            if len(one.split()) > LONG:
                print(f"  {len(one.split())}: {one[:100]}")
    words = lengths()
    print(f"all: {_summary(words)}")


if __name__ == "__main__":
    _main()
