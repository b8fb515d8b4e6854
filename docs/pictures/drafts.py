"""The picture of what drafts and verifications read when a model drafts from its own KV cache."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from sheet import DEVICE_EDGE, HOST_EDGE, INK, PAPER, SOFT, arrow, canvas

KEPT, REST, TAIL, UNREAD = HOST_EDGE, "#a9c6ea", DEVICE_EDGE, "#e6e9ec"
# Pages of a sealed chunk: those that drafts read in each of two head groups, and all of them.
FIRST, PAGES, CHUNKS = (3, 1), 5, 2
SIZE, STEP, GAP, LEFT = 0.4, 0.45, 0.3, 3.3
TAIL_TOKENS = 3
COMPUTED = (0, 3, 4, 3)  # tokens behind the tail: γ is 3, and two drafts are accepted
ROWS = (
    (
        "1 · a sealed chunk",
        "keeps all entries, those that score best\nin its first pages (here 3 and 1 of 5)",
    ),
    (
        "2 · a draft pass",
        "reads the first pages and the raw tail;\nwrites what it computes behind the tail",
    ),
    (
        "3 · the verification",
        "reads all pages, and computes the same\ntokens again over what drafting wrote",
    ),
    (
        "4 · what is accepted",
        "stays in the tail; the rest is released.\nThe state is the one without drafts",
    ),
)


def draw_drafts() -> None:
    """Chunks stored best first; what a draft pass reads, what a verification reads, what stays."""
    ax = canvas(11.4, 6.3)
    for number, (title, below) in enumerate(ROWS):
        y = 5.1 - 1.45 * number
        ax.text(0.15, y + 0.72, title, size=12, weight="bold", color=INK, va="center")
        ax.text(0.15, y + 0.24, below, size=9, color=SOFT, va="center", linespacing=1.4)
        for group in range(len(FIRST)):
            draw_group(ax, y + 0.5 * (1 - group), group, number)
    draw_marks(ax)


def draw_group(ax: Axes, y: float, group: int, row: int) -> None:
    """One group's pages: sealed chunks, then the tokens of the tail and of drafts."""
    for chunk in range(CHUNKS):
        for page in range(PAGES):
            x = LEFT + (chunk * PAGES + page) * STEP + chunk * GAP
            first = page < FIRST[group]
            colour = KEPT if first else UNREAD if row == 1 else REST
            draw_cell(ax, x, y, SIZE, colour)
    left = LEFT + CHUNKS * (PAGES * STEP + GAP)
    for token in range(TAIL_TOKENS):
        draw_cell(ax, left + token * STEP / 2, y, SIZE / 2, TAIL)
    style: dict[str, Any] = {"hatch": "////"} if row == 1 else {}
    for token in range(COMPUTED[row]):
        x = left + (TAIL_TOKENS + token) * STEP / 2 + 0.08
        draw_cell(ax, x, y, SIZE / 2, TAIL, **style)


def draw_cell(ax: Axes, x: float, y: float, width: float, colour: str, **style: Any) -> None:
    """A page, or a token of the tail."""
    ax.add_patch(Rectangle((x, y), width, SIZE, fc=colour, ec=PAPER, lw=1.2, **style))


def draw_marks(ax: Axes) -> None:
    """The names of the columns, and what the newest tokens are in each row."""
    for chunk in range(CHUNKS):
        x = LEFT + chunk * (PAGES * STEP + GAP) + PAGES * STEP / 2
        ax.text(x, 6.12, f"sealed chunk {chunk}", size=9, ha="center", color=SOFT)
    tail = LEFT + CHUNKS * (PAGES * STEP + GAP)
    ax.text(tail, 6.12, "raw tail", size=9, color=SOFT)
    right = tail + (TAIL_TOKENS + max(COMPUTED)) * STEP / 2 + 0.25
    notes = ("", "γ passes of\none token", "γ + 1 tokens\nin one pass", "")
    for number, note in enumerate(notes):
        ax.text(right, 5.1 - 1.45 * number + 0.45, note, size=9, color=INK, va="center")
    x = tail + (TAIL_TOKENS + COMPUTED[1] / 2) * STEP / 2 + 0.08
    arrow(ax, (x, 3.62), (x, 3.14))
    for x, colour, label in (
        (LEFT, KEPT, "read by drafts"),
        (LEFT + 1.6, REST, "read by verifications only"),
        (LEFT + 4.1, UNREAD, "not read"),
    ):
        ax.add_patch(Rectangle((x, 0.14), 0.2, 0.16, fc=colour, ec=PAPER))
        ax.text(x + 0.28, 0.22, label, size=9, va="center", color=SOFT)
