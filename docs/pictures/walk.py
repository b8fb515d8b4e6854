"""One request is one walk through the house."""

from __future__ import annotations

from matplotlib.patches import Rectangle
from sheet import (
    DEVICE,
    DEVICE_EDGE,
    HOST,
    HOST_EDGE,
    INK,
    SOFT,
    WIRE,
    WIRE_EDGE,
    arrow,
    box,
    canvas,
)


def draw_walk() -> None:
    """One request's walk: text, tokens, pages reserved, plan, kernel, token, text."""
    ax = canvas(11.4, 4.9)
    width, height, gap, top = 1.98, 1.62, 0.32, 2.72
    first = [
        ("text", "chat template,\ntokenizer\n\nengine/text.py", (WIRE, WIRE_EDGE)),
        ("tokens", "prefix cache: which\nchunks are known?\n\ncache/prefix.py", (HOST, HOST_EDGE)),
        (
            "pages reserved",
            "counts are a formula\nof the length\n\ncache/manager.py",
            (HOST, HOST_EDGE),
        ),
        (
            "plan",
            "which task reads which\nentries, longest first\n\nplan/aot.py",
            (HOST, HOST_EDGE),
        ),
        ("kernel", "append, attend,\nmerge over pages\n\nkernels/", (DEVICE, DEVICE_EDGE)),
    ]
    for number, (title, lines, colours) in enumerate(first):
        x = 0.11 + number * (width + gap)
        box(ax, x, top, width, height, title, lines, colours)
        if number:
            arrow(ax, (x - gap + 0.03, top + height / 2), (x - 0.03, top + height / 2))
    low, seal_low = 0.5, 1.02
    column = [0.11 + number * (width + gap) for number in range(5)]
    box(
        ax,
        column[4],
        low,
        width,
        height,
        "token",
        "sampled, one per\nrequest and step\n\nengine/sampling.py",
        (DEVICE, DEVICE_EDGE),
    )
    box(
        ax,
        column[0],
        low,
        width,
        height,
        "text",
        "whole characters,\nstop strings, events\n\nengine/completion.py",
        (WIRE, WIRE_EDGE),
    )
    box(
        ax,
        column[1],
        seal_low,
        3 * width + 2 * gap,
        low + height - seal_low,
        "a full chunk of C tokens is sealed",
        "each head keeps its own fixed number of entries, packed into their final "
        "pages\nmodel/sealing.py · compress/",
        (DEVICE, DEVICE_EDGE),
    )
    middle, line = column[4] + width / 2, 0.74
    arrow(ax, (middle, top - 0.03), (middle, low + height + 0.03))
    arrow(ax, (column[4] - 0.03, line), (column[1] - gap + 0.03, line))
    ax.text(
        (column[1] + column[4] - gap) / 2,
        line - 0.15,
        "streamed at once; then the next step",
        size=9,
        color=SOFT,
        ha="center",
        va="center",
    )
    arrow(ax, (column[4] + 0.1, top - 0.03), (column[4] - gap - 0.15, low + height + 0.03))
    found = column[1] + width / 2
    arrow(ax, (found, low + height + 0.03), (found, top - 0.03), linestyle=(0, (4, 2)))
    ax.text(
        found + 0.14,
        (low + height + top) / 2,
        "immutable, shared: found by whoever has the same prefix",
        size=9,
        color=SOFT,
        va="center",
    )
    for x, label, (face, edge) in (
        (0.11, "outside", (WIRE, WIRE_EDGE)),
        (1.31, "host: integers, no torch", (HOST, HOST_EDGE)),
        (3.75, "device: tensors", (DEVICE, DEVICE_EDGE)),
    ):
        ax.add_patch(Rectangle((x, 0.14), 0.2, 0.16, fc=face, ec=edge, lw=1))
        ax.text(x + 0.28, 0.22, label, size=9, va="center", color=SOFT)
    ax.text(
        0.11,
        4.62,
        "engine/loop.py:  schedule → plan → run → emit → commit",
        size=11,
        color=INK,
        va="center",
        family="monospace",
    )
