"""Draw the pictures of the README and of docs/: `python docs/pictures/make.py` (needs matplotlib).

The page picture is not drawn by hand: its groups, tables and page ids come from the cache itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from drafts import draw_drafts
from fleet import draw_fleet
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from sheet import INK, PAPER, SOFT, canvas
from walk import draw_walk

from tangram.cache.accounting import check_accounting
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.types import Geometry

HEADS = ("#3b74b8", "#7fb0e6", "#c8771c", "#f0b56d")
CHUNKS, TAIL_TOKENS = 2, 22


def example() -> tuple[CacheManager, Layout, int]:
    """A cache with one sequence of two sealed chunks and a raw tail, after others have come and
    gone.
    """
    geometry = Geometry(2, 2, 4, 8, 1000, 256, (None, None))
    layout = Layout.build(
        geometry,
        chunk_tokens=64,
        page_tokens=16,
        heads_per_page=2,
        max_tokens=192,
        groups=[[(0, 0), (1, 1)], [(1, 0), (0, 1)]],
        sealed_pages=[3, 1],
    )
    retention = Retention(0.5, layout, "example")
    cache = CacheManager([retention], total_pages=24, max_sequences=4, prefix_caching=False)
    cache.ledger.take(24)
    cache.ledger.release(np.random.default_rng(3).permutation(24).astype(np.int32))
    tokens = np.arange(CHUNKS * layout.chunk_tokens + TAIL_TOKENS)
    sequence = cache.admit(ChunkKeys(retention, ""), tokens, len(tokens))
    if sequence is None:
        raise RuntimeError("the example does not fit")
    for _ in range(CHUNKS):
        cache.seal(sequence)
        cache.commit(sequence, tokens)
    cache.grow(sequence, TAIL_TOKENS)
    check_accounting(cache)
    return cache, layout, sequence.slot


def draw_pages() -> None:
    """Ragged lengths: what each head keeps, the tables of its group, and the one pool."""
    cache, layout, slot = example()
    ax = canvas(11.4, 6.35)
    draw_kept(ax, layout)
    used = draw_tables(ax, cache, layout, slot)
    draw_pool(ax, cache.ledger.total, used, layout)


def head_name(head: tuple[int, int]) -> str:
    """`layer 0 · head 1`."""
    return f"layer {head[0]} · head {head[1]}"


def draw_heading(ax: Axes, x: float, y: float, title: str, below: str) -> None:
    """A heading at `y`, and a line in grey below it."""
    ax.text(x, y, title, size=12, weight="bold", color=INK, va="center")
    ax.text(x, y - 0.3, below, size=9, color=SOFT, va="center")


def draw_kept(ax: Axes, layout: Layout) -> None:
    """Left: one bar a head, as long as what it keeps."""
    draw_heading(
        ax,
        0.15,
        6.1,
        "1 · each head keeps what it needs",
        f"a sequence of {CHUNKS} × {layout.chunk_tokens} + {TAIL_TOKENS} tokens; what is dropped "
        "is grey",
    )
    scale, left = 2.55 / (CHUNKS * layout.chunk_tokens + TAIL_TOKENS), 1.5
    y = 5.3
    for group, members in enumerate(layout.groups):
        kept = int(layout.sealed_pages[group]) * layout.page_tokens
        for column, head in enumerate(members):
            ax.text(
                left - 0.1, y + 0.13, head_name(head), size=9, ha="right", va="center", color=INK
            )
            draw_bar(ax, left, y, scale, kept, layout.chunk_tokens, HEADS[2 * group + column])
            y -= 0.38
        y -= 0.12
    for x, label in ((0.5, "chunk 0"), (1.5, "chunk 1")):
        ax.text(
            left + x * layout.chunk_tokens * scale, y + 0.24, label, size=9, ha="center", color=SOFT
        )
    ax.text(
        left + (CHUNKS * layout.chunk_tokens + TAIL_TOKENS / 2) * scale,
        y + 0.24,
        "tail",
        size=9,
        ha="center",
        color=SOFT,
    )


def draw_bar(
    ax: Axes, left: float, y: float, scale: float, kept: int, chunk_tokens: int, colour: str
) -> None:
    """One head's chunks, of each of which it keeps `kept` tokens, and its tail."""
    edge: dict[str, Any] = {"ec": PAPER, "lw": 1.5}
    for chunk in range(CHUNKS):
        x = left + chunk * chunk_tokens * scale
        ax.add_patch(Rectangle((x, y), chunk_tokens * scale, 0.26, fc="#e6e9ec", **edge))
        ax.add_patch(Rectangle((x, y), kept * scale, 0.26, fc=colour, **edge))
    x = left + CHUNKS * chunk_tokens * scale
    ax.add_patch(
        Rectangle((x, y), TAIL_TOKENS * scale, 0.26, fc=colour, hatch="////", alpha=0.75, **edge)
    )


def draw_tables(
    ax: Axes, cache: CacheManager, layout: Layout, slot: int
) -> dict[int, tuple[int, bool, int]]:
    """Right: the groups' block tables. Returns page → (group, is raw, entries used)."""
    left = 5.0
    draw_heading(
        ax,
        left,
        6.1,
        "2 · heads of similar need share a page table",
        "sealed chunk after sealed chunk, then the raw tail",
    )
    used: dict[int, tuple[int, bool, int]] = {}
    for group in range(len(layout.groups)):
        used |= draw_table(ax, cache, layout, slot, group, left)
    chunks, tail = CHUNKS * layout.chunk_pages, -(-TAIL_TOKENS // layout.page_tokens)
    whole = len(layout.groups) * (chunks + tail)
    ax.text(
        left,
        3.52,
        f"{len(used)} pages; uncompressed it would be {whole}",
        size=9,
        color=SOFT,
        va="center",
    )
    return used


def draw_table(
    ax: Axes, cache: CacheManager, layout: Layout, slot: int, group: int, left: float
) -> dict[int, tuple[int, bool, int]]:
    """One group's block table. Returns its pages as `draw_tables` does."""
    size, y = 0.36, 4.98 - group * 0.92
    names = " and ".join(map(head_name, layout.groups[group]))
    ax.text(left, y + size + 0.14, f"group {group}:  {names}", size=9, color=INK)
    begin, length = int(layout.group_offset[group]), int(cache.lengths[slot, group])
    sealed = CHUNKS * int(layout.sealed_pages[group])
    pages = -(-length // layout.page_tokens)
    used: dict[int, tuple[int, bool, int]] = {}
    for index in range(pages):
        page = int(cache.tables[slot, begin + index])
        raw = index >= sealed
        used[page] = (group, raw, min(layout.page_tokens, length - index * layout.page_tokens))
        # A gap after each chunk
        gap = (0.12 if index >= layout.sealed_pages[group] else 0) + (0.12 if raw else 0)
        x = left + index * (size + 0.05) + gap
        style: dict[str, Any] = {"lw": 1.4, "linestyle": "--" if raw else "-"}
        ax.add_patch(Rectangle((x, y), size, size, fc=PAPER, ec=HEADS[2 * group], **style))
        ax.text(x + size / 2, y + size / 2, str(page), size=10, ha="center", va="center", color=INK)
    x = left + pages * (size + 0.05) + 0.42
    ax.text(x, y + size / 2, f"length {length}", size=9, va="center", color=SOFT)
    return used


def draw_pool(ax: Axes, total: int, used: dict[int, tuple[int, bool, int]], layout: Layout) -> None:
    """Below: the one pool; every page has Hp columns of P entries."""
    draw_heading(
        ax,
        0.15,
        3.02,
        "3 · one pool for all layers",
        "a page = Hp columns (here 2), each a contiguous block of P keys and P values (here 16) "
        "of one head;"
        " any free page serves any group",
    )
    columns, width, height, left, top = 12, 0.78, 0.86, 0.15, 1.58
    for page in range(total):
        x = left + (page % columns) * (width + 0.152)
        y = top - (page // columns) * (height + 0.34)
        ax.text(
            x + width / 2,
            y + height + 0.04,
            str(page),
            size=8.5,
            ha="center",
            color=INK if page in used else SOFT,
        )
        for column in range(layout.heads_per_page):
            draw_column(
                ax, x + column * width / 2, y, width / 2, height, used.get(page), column, layout
            )
        edge = HEADS[2 * used[page][0]] if page in used else "#c9d0d6"
        style = "--" if page in used and used[page][1] else "-"
        ax.add_patch(Rectangle((x, y), width, height, fc="none", ec=edge, lw=1.4, linestyle=style))


def draw_column(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    use: tuple[int, bool, int] | None,
    column: int,
    layout: Layout,
) -> None:
    """One head's P entries of a page, filled from the top."""
    ax.add_patch(Rectangle((x, y), width, height, fc="#f6f7f8", ec="none"))
    if use is None:
        return
    group, raw, entries = use
    filled = height * entries / layout.page_tokens
    ax.add_patch(
        Rectangle(
            (x, y + height - filled),
            width,
            filled,
            fc=HEADS[2 * group + column],
            ec=PAPER,
            lw=0.8,
            hatch="////" if raw else None,
            alpha=0.75 if raw else 1.0,
        )
    )
    if column + 1 < layout.heads_per_page:
        ax.plot([x + width] * 2, [y, y + height], color=PAPER, lw=1.2)


def main(folder: Path, suffix: str) -> None:
    """Write the pictures into `folder`, without a date so that equal pictures are equal files."""
    mpl.rcParams |= {
        "svg.hashsalt": "tangram",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "hatch.linewidth": 0.6,
    }
    pictures = {"walk": draw_walk, "pages": draw_pages, "drafts": draw_drafts, "fleet": draw_fleet}
    for name, draw in pictures.items():
        draw()
        plt.savefig(
            folder / f"{name}.{suffix}",
            dpi=110,
            metadata={"Date": None} if suffix == "svg" else None,
        )
        plt.close()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent,
        sys.argv[2] if len(sys.argv) > 2 else "svg",
    )
