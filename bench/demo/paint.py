"""A paragraph of the document, each word styled by the share of its KV entries that is kept."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from rich.text import Text

from bench.demo.kept_tokens import KeptEntries

# The smallest share of each style.
STEPS = (
    (0.00, "bright_black"),
    (0.15, "#ffffff on #40351a"),
    (0.20, "#ffffff on #6b5416"),
    (0.25, "#000000 on #b58a12"),
    (0.30, "bold #000000 on #ffc61a"),
)
MARKED = STEPS[-1][0]


@dataclass(frozen=True)
class Word:
    """A word of a prompt, its tokens [begin, end), and the kept share of their entries."""

    text: str
    begin: int
    end: int
    share: float


def words_of(pieces: Sequence[str], paragraph: str, kept: KeptEntries) -> list[Word]:
    """The words of `paragraph` in a prompt whose tokens read `pieces`, all in sealed chunks.

    Raises `ValueError` if the prompt has no such paragraph.
    """
    start, ends = "".join(pieces).index(paragraph), list(accumulate(map(len, pieces)))
    words: list[Word] = []
    for match in re.finditer(r"\S+", paragraph):
        begin = bisect_right(ends, start + match.start())
        end = bisect_left(ends, start + match.end()) + 1
        words.append(Word(match.group(), begin, end, fmean(kept.shares(begin, end))))
    return words


def paint(words: Sequence[Word], *, colored: bool) -> Text:
    """The words by `STEPS`; without colours those that have `MARKED` are in brackets."""
    if not colored:
        return Text(" ".join(f"[{w.text}]" if w.share >= MARKED else w.text for w in words))
    return Text(" ").join(Text(word.text, style_of(word.share)) for word in words)


def style_of(share: float) -> str:
    """The style of the highest step that `share` reaches."""
    return next(style for least, style in reversed(STEPS) if share >= least)
